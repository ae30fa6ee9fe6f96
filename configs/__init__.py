"""Configuration: YAML groups, their typed shape (`schema`), the entry points' decorator (`entry`)."""
