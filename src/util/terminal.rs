//! What the output of this process is shown by: a terminal, the cell of a notebook, or a file.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget};

/// "0" where the variables of a notebook are set and what is shown is a terminal all the same.
pub const NOTEBOOK: &str = "LORA_TRAIN_NOTEBOOK";

/// How the variables begin that Jupyter, Colab and Kaggle set in a notebook. Kaggle's other ones are of its API.
const OF_NOTEBOOKS: [&str; 6] =
    ["JPY_PARENT_PID", "COLAB_", "KAGGLE_KERNEL_", "KAGGLE_CONTAINER_", "KAGGLE_DATA_PROXY_", "KAGGLE_URL_"];

/// Whether a cell of a notebook shows what this process writes, also where it gives it a terminal of its own.
#[must_use]
pub fn is_notebook() -> bool {
    std::env::var_os(NOTEBOOK).is_none_or(|value| value != "0")
        && std::env::vars_os().any(|(name, _)| is_of_notebook(&name.to_string_lossy()))
}

fn is_of_notebook(variable: &str) -> bool {
    OF_NOTEBOOKS.iter().any(|start| variable.starts_with(start))
}

/// Whether a stream shows lines that are drawn again and again. A notebook knows but some of the codes for that: of what
/// was drawn over, the rest of the lines is lost.
#[must_use]
pub fn redraws(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb") && !is_notebook()
}

/// A bar on standard error, where that [`redraws`].
#[must_use]
pub fn bar(length: u64) -> ProgressBar {
    let target = if redraws(&stderr()) { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    ProgressBar::with_draw_target(Some(length), target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notebooks_are_known_by_their_variables_and_the_api_of_kaggle_is_none() {
        for variable in
            ["JPY_PARENT_PID", "COLAB_RELEASE_TAG", "COLAB_GPU", "KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"]
        {
            assert!(is_of_notebook(variable), "{variable}");
        }
        for variable in ["KAGGLE_USERNAME", "KAGGLE_KEY", "KAGGLE_CONFIG_DIR", "TERM", "JPY_API_TOKEN"] {
            assert!(!is_of_notebook(variable), "{variable}");
        }
    }
}
