//! The recipe: its sections composed.
