//! What of a `[lora]` section does not fit a model.

/// A target, pattern or layer list that does not fit the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// A target that matches no linear layer of the blocks.
    #[error("`lora.target_modules`: `{target}` matches no linear layer of this model\n  hint: {hint}")]
    NoMatch {
        /// The target.
        target: String,
        /// What may be meant.
        hint: String,
    },
    /// The head or the embedding, which have no low-rank adapters.
    #[error(
        "`lora.target_modules`: `{target}` cannot be adapted: `modules_to_save` trains head and embedding as a \
         whole\n  hint: `\"all-linear\"` takes every linear layer but these, as in PEFT"
    )]
    Frozen {
        /// The target.
        target: String,
    },
    /// Experts, or what chooses them.
    #[error(
        "`lora.target_modules`: in this model `{target}` names only experts, which have adapters with `lora.expert_rank` \
         alone, or routers, which have them where a name says so and no expression\n  hint: take it out, or write \
         \"all-linear\", which takes every other linear layer"
    )]
    Experts {
        /// The target.
        target: String,
    },
    /// What transformers reads past an adapter.
    #[error(
        "`lora.target_modules`: `{target}` has no adapters in this model: PEFT refuses them, since the kernel of its state spaces \
         reads the weight alone\n  hint: take it out, or write \"all-linear\", which takes every other linear layer"
    )]
    Bare {
        /// The target.
        target: String,
    },
    /// A regular expression that does not compile.
    #[error("`lora.{key}`: `{pattern}` is not a regular expression: {reason}")]
    Regex {
        /// The recipe key.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// The parser's message.
        reason: String,
    },
    /// A layer that the model does not have.
    #[error("`lora.layers_to_transform` = {layer}, expected layers from 0 to {last}: the model has {num_layers}")]
    NoLayer {
        /// The layer.
        layer: usize,
        /// The last layer.
        last: usize,
        /// Number of layers.
        num_layers: usize,
    },
    /// A start that these layers, or their form, do not allow.
    #[error("`lora.init_lora_weights`: {0}")]
    Start(String),
    /// Tokens that cannot be trained.
    #[error("`lora.trainable_token_indices`: {0}")]
    Tokens(String),
    /// Modules that cannot be trained as a whole.
    #[error("`lora.modules_to_save`: {0}")]
    Modules(String),
    /// Experts that cannot be adapted so.
    #[error("`lora.expert_rank`: {0}")]
    ExpertRank(String),
    /// More names or patterns than anybody means.
    #[error("`lora.{key}` has {count} entries, expected at most {most}: the model has fewer modules")]
    TooMany {
        /// The recipe key.
        key: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// No layer is left.
    #[error(
        "no layer is left to adapt: `lora.target_modules` less `lora.exclude_modules`, in the layers of \
         `lora.layers_to_transform` and `lora.layers_pattern`"
    )]
    NothingLeft,
    /// A pattern of which earlier ones have taken every layer.
    #[error(
        "`lora.{key}`: `{pattern}` matches no adapted layer that an earlier one has not taken: the first that matches counts\n  \
         hint: put it before the others, or take it out"
    )]
    PatternTaken {
        /// The recipe key.
        key: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A pattern that matches none of the adapted layers.
    #[error("`lora.{key}`: `{pattern}` matches none of the adapted layers")]
    PatternNoMatch {
        /// The recipe key.
        key: &'static str,
        /// The pattern.
        pattern: String,
    },
}
