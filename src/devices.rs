//! `selkie devices`: lists the devices, and the reason why a device cannot be used.

use serde_json::json;

use crate::{
    args::DevicesArgs,
    backend,
    failure::Outcome,
    terminal::{self, Output},
};

/// Lists the devices of all backends, in the order in which `--backend auto` tries them.
pub fn run(args: &DevicesArgs) -> Outcome {
    let devices = backend::devices();
    let mut out = Output::new();
    if args.json {
        let devices = devices.iter().map(|d| {
            json!({
                "backend": d.backend,
                "index": d.index,
                "name": d.name,
                "memory_bytes": d.memory,
                "usable": d.usable.is_ok(),
                "reason": d.usable.as_ref().err(),
            })
        });
        return out.json(&devices.collect());
    }
    for d in devices {
        let memory = d.memory.map(|bytes| format!(", {}", terminal::size(bytes))).unwrap_or_default();
        match &d.usable {
            Ok(()) => out.line(&format!("{:<5} {}  {}{memory}", d.backend, d.index, d.name))?,
            Err(why) => out.line(&format!("{:<5} -  {}{memory}: not usable: {why}", d.backend, d.name))?,
        }
    }
    Ok(())
}
