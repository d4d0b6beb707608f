//! The `lora-train` command.

#[global_allocator]
static ALLOCATOR: lora_train::util::allocator::BySize = lora_train::util::allocator::BySize;

fn main() -> std::process::ExitCode {
    lora_train::commands::cli::main()
}
