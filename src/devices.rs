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
        let index = d.index.map_or("-".into(), |i| i.to_string());
        let memory = d.memory.map(terminal::size);
        let about: Vec<String> = d.name.into_iter().chain(memory).collect();
        let about = match d.usable {
            Ok(()) => about.join(", "),
            Err(why) if about.is_empty() => format!("not usable: {why}"),
            Err(why) => format!("{}; not usable: {why}", about.join(", ")),
        };
        out.line(&format!("{:<5} {index}  {about}", d.backend))?;
    }
    Ok(())
}
