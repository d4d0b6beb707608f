//! The `lora-train` command.

#[global_allocator]
static ALLOCATOR: lora_train::budget::Budgeted = lora_train::budget::Budgeted;

fn main() -> std::process::ExitCode {
    lora_train::cli::main()
}
