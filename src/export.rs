//! Adapters and merged models in the formats of PEFT and Hugging Face.
