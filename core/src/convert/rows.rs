//! Rows of stored tensors as f32, in the order of a file that is written.

use crate::{Result, checkpoint::StoredTensor, format::Format, gguf::Change};

/// Elements that are held at a time, in f32.
pub(super) const HELD: usize = 4 << 20;

/// Where the rows of a tensor come from.
#[derive(Clone)]
pub(super) struct Rows {
    /// Elements of a row; 1 of a vector.
    pub width: usize,
    pub tensors: Vec<StoredTensor>,
    /// Runs of rows in order: the tensor, its first row, and how many.
    pub runs: Vec<(usize, usize, usize)>,
    pub columns: Option<Vec<usize>>,
    /// What has to be undone on the elements.
    pub change: Change,
    /// A factor for each row, or one for all; none if empty.
    pub factors: Vec<f32>,
}

impl Rows {
    /// All rows of one tensor.
    pub fn whole(tensor: StoredTensor) -> Self {
        let width = if tensor.shape.len() < 2 { 1 } else { tensor.k() };
        let rows = tensor.shape.iter().product::<usize>() / width.max(1);
        Self {
            width,
            tensors: vec![tensor],
            runs: vec![(0, 0, rows)],
            columns: None,
            change: Change::None,
            factors: vec![],
        }
    }

    pub fn count(&self) -> usize {
        self.runs.iter().map(|run| run.2).sum()
    }

    /// The only tensor, if the rows are it as it is.
    pub fn as_stored(&self) -> Option<&StoredTensor> {
        let plain = self.columns.is_none() && self.change == Change::None && self.factors.is_empty();
        match (self.tensors.as_slice(), self.runs.as_slice()) {
            ([one], [(_, 0, count)]) if plain && one.shape.iter().product::<usize>() == count * self.width => Some(one),
            _ => None,
        }
    }

    /// The elements of `count` rows from `first` on.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn read(&self, first: usize, count: usize) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(count * self.width);
        let mut start = 0;
        for (tensor, from, rows) in &self.runs {
            let (a, b) = (first.max(start), (first + count).min(start + rows));
            if a < b {
                values.extend(self.stored(*tensor, from + a - start, b - a).await?);
            }
            start += rows;
        }
        if let Some(columns) = &self.columns {
            let mut row = vec![0.0; self.width];
            for values in values.chunks_exact_mut(self.width) {
                row.copy_from_slice(values);
                columns.iter().zip(values).for_each(|(from, to)| *to = row[*from]);
            }
        }
        if self.change != Change::None {
            values.iter_mut().for_each(|x| *x = self.change.undo(*x));
        }
        for (i, row) in values.chunks_exact_mut(self.width.max(1)).enumerate() {
            let factor = match self.factors.as_slice() {
                [] => break,
                [one] => *one,
                each => each[first + i],
            };
            row.iter_mut().for_each(|x| *x *= factor);
        }
        Ok(values)
    }

    async fn stored(&self, tensor: usize, first: usize, count: usize) -> Result<Vec<f32>> {
        let tensor = &self.tensors[tensor];
        let elements = first * self.width..(first + count) * self.width;
        let (block, bytes) = tensor.format.block().unwrap_or((1, tensor.dtype.bytes()));
        // The elements of a matrix of one row are rows here, which are no whole blocks.
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let stored = tensor.read(blocks.start * bytes..blocks.end * bytes).await?;
        let mut values = match tensor.format {
            Format::Plain => tensor.dtype.to_f32(&stored),
            coded => coded.decode(&stored),
        };
        values.drain(..elements.start - blocks.start * block);
        values.truncate(elements.len());
        Ok(values)
    }
}

/// Appends a row, as a part of the run before it if it follows on that.
pub(super) fn push(runs: &mut Vec<(usize, usize, usize)>, tensor: usize, row: usize) {
    match runs.last_mut() {
        Some((t, first, count)) if *t == tensor && *first + *count == row => *count += 1,
        _ => runs.push((tensor, row, 1)),
    }
}
