//! Model files from the Hugging Face Hub.
