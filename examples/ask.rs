//! Asks one question through the library's front door and prints the answer as it is generated.
//!
//! `cargo run --release --example ask [MODEL [QUESTION]]`; without arguments the demo model adds two numbers.

use std::io::{Write, stdout};

use selkie::Device;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| DEMO.to_owned());
    let question = args.next().unwrap_or_else(|| "What is 17 + 25?".to_owned());

    let model = selkie::open(path)?.device(Device::Auto).load()?;
    let mut chat = model.chat().system("Be brief.");
    for piece in chat.ask(question)? {
        print!("{}", piece?);
        // A closed pipe is no reason to stop.
        stdout().flush().ok();
    }
    println!();
    Ok(())
}
