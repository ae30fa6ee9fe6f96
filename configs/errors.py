"""Errors a user can mend. Each message says what was wrong, where, and what to do.

Entry points print such an error as one paragraph and exit with status 2; anything else is a defect of ours
and keeps its traceback.
"""


class LeadoutError(Exception):
    """Base of every error that is the input's or the machine's fault, not the code's."""


class ConfigError(LeadoutError):
    """A configuration that cannot work: an unknown key, a wrong type or an impossible combination."""


class TargetError(LeadoutError):
    """A target that cannot be used as it is, as when its cache cannot be cropped."""


class CheckpointError(LeadoutError):
    """A checkpoint that is truncated, incomplete, or belongs to another target or tokenizer."""


class TrafficError(LeadoutError):
    """Traffic that cannot be read or rendered."""


class StorageError(LeadoutError):
    """A folder that cannot be written or a disk that is full."""


class MeasurementError(LeadoutError):
    """A file that is no measurement, or measurements that cannot be set side by side."""
