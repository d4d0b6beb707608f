//! Strict reading of a TOML table.
