//! Sub-commands other than training.
