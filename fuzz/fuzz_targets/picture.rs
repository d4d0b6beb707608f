#![no_main]

lora_train_fuzz::target!("picture");
