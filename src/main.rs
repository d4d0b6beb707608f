//! The `lora-train` command.

#[global_allocator]
static ALLOCATOR: lora_train::allocator::BySize = lora_train::allocator::BySize;

fn main() -> std::process::ExitCode {
    lora_train::cli::main()
}
