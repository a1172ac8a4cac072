//! Files that the engine writes itself: equal to those that other converters write, and the same model when they are read.

use std::sync::Arc;

use pollster::block_on;
use selkie_core::{
    Error, Result,
    convert::{Conversion, Target, Written},
    gguf::Gguf,
    model_dir::ModelFiles,
    source::{Dir, Source},
};

use super::{Memory, families, golden_folders, logits, open, quantised::hybrid, some_ids};
use selkie_core::format::Format;

/// A written file, and what is said of its tensors.
pub fn write(files: &ModelFiles, target: Target) -> Result<(Vec<u8>, Vec<Written>)> {
    write_plan(&block_on(Conversion::plan(files, target, false))?)
}

/// The same of a plan.
pub fn write_plan(plan: &Conversion) -> Result<(Vec<u8>, Vec<Written>)> {
    let (mut out, mut written, mut last) = (Vec::new(), Vec::new(), 0);
    let mut report = |done: u64, tensor: Option<&Written>| {
        assert!(done >= last && done <= plan.bytes());
        last = done;
        written.extend(tensor.cloned());
        Ok(())
    };
    block_on(plan.write(&mut out, &|e| Error::io("memory", e), &mut report))?;
    assert_eq!(out.len() as u64, plan.bytes());
    Ok((out, written))
}

pub fn folder(path: &std::path::Path) -> ModelFiles {
    block_on(ModelFiles::open(Arc::new(Dir::open(path).unwrap()), || 0)).unwrap()
}

/// The root of the sum of squared differences over that of squares.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = |x: f32| f64::from(x) * f64::from(x);
    let missed: f64 = a.iter().zip(b).map(|(a, b)| squares(a - b)).sum();
    (missed / b.iter().map(|x| squares(*x)).sum::<f64>()).sqrt()
}

#[test]
fn written_files_have_the_tensors_of_other_converters_and_are_the_same_models() {
    let ids = some_ids();
    let mut compared = Vec::new();
    for path in golden_folders() {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let files = folder(&path);
        let other = families::convert(&path).filter(|_| name != "bamba");
        let (bytes, _) = match (write(&files, Target::F32), &other) {
            (Ok(file), Some(_)) => file,
            (Err(e), None) => {
                assert!(e.to_string().contains("a GGUF file of"), "{name}: {e}");
                assert!(name != "qwen3_window" || e.to_string().contains("cannot say `window`"), "{e}");
                continue;
            }
            (Err(e), Some(_)) => panic!("{name}: {e}"),
            (Ok(_), None) => panic!("{name} was written"),
        };
        let source = Memory::of("model.gguf", bytes.clone());
        let own = block_on(Gguf::open(&source, "model.gguf")).unwrap();
        let other = other.unwrap().out;
        let names = |mut n: Vec<&String>| {
            n.sort();
            n.into_iter().cloned().collect::<Vec<_>>()
        };
        assert_eq!(names(own.tensors().keys().collect()), names(other.tensors.keys().collect()), "{name}");
        for (tensor, stored) in own.tensors() {
            let (shape, _, want) = &other.tensors[tensor];
            assert_eq!(&stored.shape, shape, "{name}: {tensor}");
            let got = block_on(source.read("model.gguf", stored.range.clone())).unwrap();
            let floats =
                |b: &[u8]| -> Vec<f32> { b.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect() };
            // Factors may be multiplied in another order, and frequencies be rounded before they are divided.
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs();
            assert!(floats(&got).iter().zip(&floats(want)).all(near), "{name}: {tensor}");
        }
        let file = open(Memory::of("model.gguf", bytes)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let want = logits(&files.config, &files.checkpoint, &ids).unwrap();
        let got = logits(&file.config, &file.checkpoint, &ids).unwrap_or_else(|e| panic!("{name}: {e}"));
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max);
        let limit = if ["llama", "qwen3", "lfm2"].contains(&name.as_str()) { 0.0 } else { 1e-5 };
        assert!(got.len() == want.len() && worst <= limit, "{name}: logits differ by {worst:e}");
        assert_eq!(file.eos().unwrap().is_empty(), files.eos().unwrap().is_empty(), "{name}");
        compared.push(name);
    }
    assert!(compared.len() >= 21, "{compared:?}");
}

#[test]
fn a_file_in_another_type_is_nearly_the_same_model() {
    let [_, plain] = hybrid(5, &[Format::Q8_0]);
    let files = open(Memory::of("model.gguf", plain.bytes())).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| (i * 29 + 7) % 96).collect();
    let want = logits(&files.config, &files.checkpoint, &ids).unwrap();
    // A router may choose another of two experts that are nearly equal.
    for (target, bound) in [
        (Target::F32, 0.0),
        (Target::Bf16, 0.05),
        (Target::Q8_0, 0.05),
        (Target::Q6K, 0.15),
        (Target::Q5KM, 0.25),
        (Target::Q4KM, 0.45),
        (Target::Iq4Nl, 0.5),
        (Target::Q4_0, 0.5),
    ] {
        let (bytes, written) = write(&files, target).unwrap();
        let file = open(Memory::of("model.gguf", bytes)).unwrap();
        let got = logits(&file.config, &file.checkpoint, &ids).unwrap();
        let found = distance(&got, &want);
        println!("{}: {found:.4}", target.name());
        assert!(found <= bound, "{}: {found}", target.name());
        assert_eq!(written.len(), plain.tensors.len());
        assert!(written.iter().all(|t| t.error() < 0.12), "{}: {written:?}", target.name());
        // What is in the type already is not coded again.
        let (again, written) = write(&file, target).unwrap();
        assert!(written.iter().all(|t| t.error() == 0.0), "{}", target.name());
        let again = open(Memory::of("model.gguf", again)).unwrap();
        assert_eq!(logits(&again.config, &again.checkpoint, &ids).unwrap(), got, "{}", target.name());
    }
}

#[test]
fn elements_that_a_type_cannot_hold_are_refused_by_name() {
    for (x, target) in [(f32::NAN, Target::F32), (f32::INFINITY, Target::Q8_0), (1e12, Target::Q4KM)] {
        let [_, mut plain] = hybrid(6, &[Format::Q8_0]);
        let (.., bytes) = plain.tensors.get_mut("blk.1.attn_q.weight").unwrap();
        bytes[400..404].copy_from_slice(&x.to_le_bytes());
        let files = open(Memory::of("model.gguf", plain.bytes())).unwrap();
        let why = write(&files, target).unwrap_err().to_string();
        assert!(why.contains("blk.1.attn_q.weight") && why.contains("not finite"), "{why}");
    }
}
