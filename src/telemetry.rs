//! What the machine does while training.
