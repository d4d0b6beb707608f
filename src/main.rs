//! The `lora-train` command.

fn main() -> std::process::ExitCode {
    lora_train::cli::main()
}
