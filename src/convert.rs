//! `selkie convert`: a model as a GGUF file.

use std::{collections::BTreeSet, io::Write, path::Path};

use selkie_core::{
    convert::{Conversion, Written},
    model_dir::ModelFiles,
    units::size,
    weights::Progress,
};
use serde_json::{Value, json};

use crate::{
    args::ConvertArgs,
    failure::{Failure, Outcome},
    model,
    output_file::{self, OutputFile},
    terminal::{self, Output},
};

/// Writes the file and reports on its tensors.
pub fn run(args: &ConvertArgs) -> Outcome {
    let files = model::open(&args.model)?;
    refuse_input(&files, &args.output)?;
    let plan = pollster::block_on(Conversion::plan(&files, args.kind, args.selkie_only))?;
    if files.gguf().is_none() {
        model::warn_of_unused(&files.checkpoint, plan.without_head);
    }
    let written = write(&plan, &args.output)?;
    if !plan.for_selkie.is_empty() {
        let what = plan.for_selkie.join(" and ");
        let why = format_args!("other programs do not know {what}: the file is for selkie alone");
        terminal::note(format_args!("{}: {why}", args.output.display()));
    }
    if plan.without_head {
        let why =
            "other programs refuse files with the model's head for drafts, so it is left out; --selkie-only writes it";
        terminal::note(format_args!("{}: {why}", args.output.display()));
    }
    let mut out = Output::new();
    if args.json {
        out.json(&facts(args, &plan, &written))?;
    } else {
        out.text(&table(&written))?;
    }
    terminal::dim_note(format_args!("{}: {}", args.output.display(), summary(&plan, &written)));
    Ok(())
}

/// An output must not be one of the files that are read.
fn refuse_input(files: &ModelFiles, output: &Path) -> Outcome {
    let stored = files.checkpoint.names().filter_map(|name| files.checkpoint.info(name));
    let mut inputs: BTreeSet<&str> = stored.map(|info| &*info.file).collect();
    inputs.extend(["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
    inputs.extend(files.gguf());
    for input in inputs {
        let path = files.source().path(input);
        if output_file::collide(output, path.as_ref()) {
            let why = "this is a file of the model that is converted; give -o another name";
            return Err(Failure::Usage(format!("{}: {why}", output.display())));
        }
    }
    Ok(())
}

fn write(plan: &Conversion, output: &Path) -> Outcome<Vec<Written>> {
    let mut out = OutputFile::create(output)?;
    let (mut bar, mut written) = (model::LoadingBar::of("converting"), Vec::new());
    let mut report = |done: u64, tensor: Option<&Written>| {
        bar.update(&Progress { done, total: plan.bytes() });
        written.extend(tensor.cloned());
        Ok(())
    };
    let error = |e| selkie_core::Error::io(output, e);
    pollster::block_on(plan.write(&mut out, &error, &mut report))?;
    drop(bar);
    out.flush().map_err(|e| out.error(e))?;
    out.commit()?;
    Ok(written)
}

/// A row per tensor, and one per type.
fn table(written: &[Written]) -> String {
    let width = written.iter().map(|t| t.name.len()).max().unwrap_or(0);
    let mut text = format!("{:<width$}  {:>20}  {:<6}  {:>9}  error\n", "tensor", "shape", "type", "size");
    for t in written {
        let shape = t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let (name, kind) = (terminal::visible(&t.name), t.kind);
        text += &format!("{name:<width$}  {shape:>20}  {kind:<6}  {:>9}  {}\n", size(t.bytes), error(t.error()));
    }
    for (kind, count, bytes, found) in by_type(written) {
        let tensors = format!("{count} tensor{}", if count == 1 { "" } else { "s" });
        text += &format!("{:<width$}  {tensors:>20}  {kind:<6}  {:>9}  {}\n", "all", size(bytes), error(found));
    }
    text
}

/// The root of mean squares relative to the elements.
fn error(found: f64) -> String {
    if found == 0.0 { "none".into() } else { format!("{:.3} %", 100.0 * found) }
}

/// Number, bytes and error of the tensors of each type.
fn by_type(written: &[Written]) -> Vec<(&'static str, usize, u64, f64)> {
    let kinds: BTreeSet<&str> = written.iter().map(|t| t.kind).collect();
    let of = |kind: &'static str| {
        let same = || written.iter().filter(move |t| t.kind == kind);
        let sum = |i: usize| same().map(|t| t.squares[i]).sum::<f64>();
        let found = if sum(0) == 0.0 { 0.0 } else { (sum(0) / sum(1)).sqrt() };
        (kind, same().count(), same().map(|t| t.bytes).sum(), found)
    };
    kinds.into_iter().map(of).collect()
}

fn summary(plan: &Conversion, written: &[Written]) -> String {
    let elements: usize = written.iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let bits = 8.0 * written.iter().map(|t| t.bytes).sum::<u64>() as f64 / elements.max(1) as f64;
    format!("{} in {} tensors, {bits:.2} bits a weight", size(plan.bytes()), written.len())
}

fn facts(args: &ConvertArgs, plan: &Conversion, written: &[Written]) -> Value {
    let tensor = |t: &Written| json!({ "name": t.name, "shape": t.shape, "type": t.kind, "bytes": t.bytes, "relative_error": t.error() });
    let of_type = |(kind, count, bytes, found): (&str, usize, u64, f64)| json!({ "type": kind, "tensors": count, "bytes": bytes, "relative_error": found });
    json!({
        "file": args.output.display().to_string(),
        "type": args.kind.name(),
        "bytes": plan.bytes(),
        "selkie_only": !plan.for_selkie.is_empty(),
        "types": by_type(written).into_iter().map(of_type).collect::<Vec<_>>(),
        "tensors": written.iter().map(tensor).collect::<Vec<_>>(),
    })
}
