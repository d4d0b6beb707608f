//! A training run, as a straight line.
