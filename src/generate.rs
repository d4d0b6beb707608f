//! Text from a model, token by token.
