//! The stored rows that a weight is made of.

use std::sync::Arc;

use super::{Checkpoint, Kind, Place, RawTensor, Run, StoredTensor, TensorInfo, header::known_dtype, locked, random};
use crate::{
    Error, Result,
    format::Format,
    gguf::{Change, Stored},
    source::Source,
    tensor::DType,
};

impl Checkpoint {
    /// The rows of the first of `names` that is stored, and what becomes of their elements.
    ///
    /// # Errors
    /// As [`Checkpoint::get`], but those of the source.
    pub(crate) fn find_runs(&self, names: &[&str], shape: &[usize]) -> Result<(Vec<Run>, Change)> {
        let Kind::Files { source, tensors, asked } = &self.kind else {
            let Kind::Random { seed, recipe } = self.kind else { unreachable!("a checkpoint is files or random") };
            let format = recipe.map_or(Format::Plain, |recipe| recipe.format(names[0], shape));
            let RawTensor { dtype, bytes, .. } = random::tensor(seed, names[0], shape, format)?;
            let tensor = StoredTensor { dtype, format, shape: shape.to_vec(), place: Place::Memory(bytes) };
            return Ok((vec![Run::whole(tensor)], Change::None));
        };
        let Some((name, info)) = names.iter().find_map(|name| tensors.get_key_value(*name)) else {
            let why =
                format!("tensor `{}` is missing; the weights are incomplete or of another model", names.join("` or `"));
            return Err(Error::model(self.place(&**source), why));
        };
        let file = source.path(&info.file);
        if !same_shape(&info.shape, shape) {
            let why = format!(
                "tensor `{name}` has shape {:?}, but config.json asks for {shape:?}; these files do not belong together",
                info.shape
            );
            return Err(Error::model(file, why));
        }
        if let Some(made) = &info.made {
            locked(asked).insert(name.clone());
            let run = |r: &crate::gguf::Rows| {
                let tensor = stored_tensor(source, name, &r.from)?;
                let mut run = Run { tensor, first: r.first, step: r.step, count: r.count };
                // A matrix of one row may be stored as a vector.
                let stored = &run.tensor.shape;
                if run.is_whole() && same_shape(stored, shape) && stored.last() == shape.last() {
                    run.tensor.shape = shape.to_vec();
                    run = Run::whole(run.tensor);
                }
                Ok(run)
            };
            return Ok((made.rows.iter().map(run).collect::<Result<_>>()?, made.change));
        }
        let run = |of: &TensorInfo, shape: &[usize]| Ok(Run::whole(tensor_of(source, name, of, shape)?));
        let runs = match &info.joined {
            Some(parts) => parts.iter().map(|part| run(part, &part.shape)).collect::<Result<_>>()?,
            None => vec![run(info, shape)?],
        };
        locked(asked).insert(name.clone());
        Ok((runs, Change::None))
    }
}

/// A tensor of a safetensors file.
fn tensor_of(source: &Arc<dyn Source>, name: &str, info: &TensorInfo, shape: &[usize]) -> Result<StoredTensor> {
    let (dtype, format) = match (&info.scaled, known_dtype(&info.dtype)) {
        (Some(scaled), _) => scaled.format(*info.shape.last().expect("scaled tensors are matrices")),
        (None, Some(_)) if info.less_one => (DType::F32, Format::Plain),
        (None, Some((dtype, _))) => (dtype, Format::Plain),
        (None, None) => {
            return Err(Error::Unsupported {
                what: format!("{}: tensor `{name}` of dtype {}", source.path(&info.file), info.dtype),
                why: "weights must be F32, BF16 or F16; use an unquantised release of the model, or a GGUF file".into(),
            });
        }
    };
    let place = Place::File { source: source.clone(), info: info.clone() };
    Ok(StoredTensor { dtype, format, shape: shape.to_vec(), place })
}

/// A tensor of a GGUF file.
///
/// # Errors
/// [`Error::Unsupported`] for a type that is not read; `name` is how the message calls it.
pub(crate) fn stored_tensor(source: &Arc<dyn Source>, name: &str, stored: &Stored) -> Result<StoredTensor> {
    let Some((format, bytes)) = stored.format else {
        return Err(Error::Unsupported {
            what: format!("{}: tensor `{name}` of type {}", source.path(&stored.file), stored.kind),
            why: "this type is not decoded; use a file with another quantisation, such as Q4_K_M or Q8_0".into(),
        });
    };
    let dtype = match (format, bytes, stored.kind.as_str()) {
        (Format::Plain, 4, _) => DType::F32,
        (Format::Plain, _, "F16") => DType::F16,
        (Format::Plain, ..) => DType::Bf16,
        _ => DType::U8,
    };
    let (dtype_name, shape) = (stored.kind.clone(), stored.shape.clone());
    let info = TensorInfo {
        dtype: dtype_name,
        shape: shape.clone(),
        file: stored.file.clone(),
        range: stored.range.clone(),
        made: None,
        scaled: None,
        joined: None,
        less_one: false,
    };
    Ok(StoredTensor { dtype, format, shape, place: Place::File { source: source.clone(), info } })
}

/// Small tensors that are not stored as they are asked for, as f32.
pub(super) async fn assembled(runs: &[Run], change: Change, shape: &[usize]) -> Result<RawTensor> {
    let mut values: Vec<f32> = Vec::new();
    // Rows of all runs stand side by side in each of the outer dimensions.
    let outer = runs.iter().map(|run| run.tensor.shape.iter().rev().skip(2).product::<usize>()).max().unwrap_or(1);
    let mut decoded = Vec::with_capacity(runs.len());
    for run in runs {
        let bytes = run.tensor.read(0..run.tensor.bytes()).await?;
        decoded.push(match run.tensor.format {
            Format::Plain => run.tensor.dtype.to_f32(&bytes),
            coded => coded.decode(&bytes),
        });
    }
    for o in 0..outer {
        for (run, all) in runs.iter().zip(&decoded) {
            let (rows, row) = (run.tensor.rows(), all.len() / outer / run.tensor.rows());
            for i in 0..run.count {
                let at = (o * rows + run.first + i * run.step) * row;
                values.extend(all[at..at + row].iter().map(|x| change.apply(*x)));
            }
        }
    }
    let bytes = bytemuck::cast_slice::<f32, u8>(&values).to_vec().into();
    Ok(RawTensor { dtype: DType::F32, shape: shape.to_vec(), bytes })
}

fn same_shape(a: &[usize], b: &[usize]) -> bool {
    a.iter().filter(|n| **n != 1).eq(b.iter().filter(|n| **n != 1))
}
