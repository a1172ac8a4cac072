//! Copies of stored rows in buffers of a device.

use super::{Loader, PIECE, Rank, most_rows};
use crate::{
    Error, Result,
    backend::Backend,
    checkpoint::StoredTensor,
    ops::{RowBlock, Weight},
    tensor::Tensor,
};

/// Rows of a block of weights that may share their scales.
const SQUARE: usize = 128;

/// Stored tensors, and which of their rows are the columns of a matrix.
pub(super) type Stored = (Vec<StoredTensor>, Vec<Piece>);

/// Rows of a stored tensor that become output columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Place in a list of tensors.
    pub tensor: usize,
    pub first: usize,
    pub step: usize,
    pub count: usize,
    pub col: usize,
    /// Bytes of each row before those that are taken.
    pub skip: usize,
}

impl Piece {
    /// Whether `next` are the rows and columns that follow.
    pub fn goes_on_as(&self, next: &Self) -> bool {
        (self.tensor, self.step, self.first + self.count * self.step, self.col + self.count, self.skip)
            == (next.tensor, next.step, next.first, next.col, next.skip)
    }
}

/// How far the pieces of a matrix were copied.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    next: usize,
    /// Rows of the next piece.
    taken: usize,
}

impl Cursor {
    /// The next pieces of one format, of at most `most` rows.
    fn block(&mut self, (tensors, pieces): &Stored, most: usize) -> Vec<Piece> {
        let (mut rows, mut copies) = (0, Vec::new());
        let kind = |p: &Piece| (tensors[p.tensor].dtype, tensors[p.tensor].format);
        let first = self.next;
        while self.next < pieces.len() && rows < most && kind(&pieces[self.next]) == kind(&pieces[first]) {
            let p = pieces[self.next];
            let count = (p.count - self.taken).min(most - rows);
            copies.push(Piece { first: p.first + self.taken * p.step, count, ..p });
            (rows, self.taken) = (rows + count, self.taken + count);
            if self.taken == p.count {
                (self.next, self.taken) = (self.next + 1, 0);
            }
        }
        copies
    }
}

impl<B: Backend> Loader<'_, B> {
    /// Copies the rows of a matrix, sorted by column, into buffers of one format within the binding limit. There is one list of
    /// rows for all ranks, or one for each, with rows of the same formats at the same columns.
    pub(super) async fn gather(
        &mut self,
        (n, k): (usize, usize),
        name: &str,
        shares: &[Stored],
    ) -> Result<Weight<B::Buf>> {
        let mut blocks = Vec::new();
        let mut cursors = vec![Cursor::default(); shares.len()];
        while cursors[0].next < shares[0].1.len() {
            let (tensors, pieces) = &shares[0];
            let piece = pieces[cursors[0].next];
            let (dtype, format) = (tensors[piece.tensor].dtype, tensors[piece.tensor].format);
            let (col, row) = (piece.col + cursors[0].taken, format.bytes(k, dtype.bytes()));
            let most = self.rows_per_binding(row, name)?.min(most_rows(k));
            let copies: Vec<Vec<Piece>> = shares.iter().zip(&mut cursors).map(|(s, c)| c.block(s, most)).collect();
            let rows = |copies: &[Piece]| copies.iter().map(|p| p.count).sum::<usize>();
            let dims = [rows(&copies[0]), row / dtype.bytes()];
            assert!(copies.iter().all(|c| rows(c) == dims[0]), "{name}: ranks with different rows");
            let squares = shares.iter().zip(&copies).all(|((tensors, _), copies)| in_squares(tensors, copies));
            let buf = self.room(name, dtype, format, &dims)?;
            for (index, copies) in copies.into_iter().enumerate() {
                let rank = (shares.len() > 1).then_some(Rank { index, of: shares.len() });
                let mut to = Stream::new(rank, buf.clone(), 0);
                for piece in copies {
                    self.copy(&shares[index].0[piece.tensor], piece, row, &mut to).await?;
                }
                to.finish(self)?;
            }
            let block = RowBlock { w: Tensor::new(buf, dtype, &dims), format, col, squares };
            self.arrange(&block)?;
            blocks.push(block);
        }
        Ok(Weight { blocks, n, k })
    }

    /// Copies `taken` bytes of each row of a piece to `to`, never holding more than two pieces of them.
    async fn copy(&mut self, tensor: &StoredTensor, p: Piece, taken: usize, to: &mut Stream<B::Buf>) -> Result<()> {
        let row = tensor.row_bytes();
        if p.step == 1 && taken == row {
            let from = p.first * row..(p.first + p.count) * row;
            for start in from.clone().step_by(PIECE) {
                to.push(self, &tensor.read(start..from.end.min(start + PIECE)).await?)?;
            }
            return Ok(());
        }
        let most = (PIECE / (row * p.step)).max(1);
        for done in (0..p.count).step_by(most) {
            let (first, count) = (p.first + done * p.step, most.min(p.count - done));
            let bytes = tensor.read(first * row..(first + (count - 1) * p.step + 1) * row).await?;
            for row in bytes.chunks(row).step_by(p.step) {
                to.push(self, &row[p.skip..p.skip + taken])?;
            }
        }
        Ok(())
    }
}

/// Whether rows of a block share scales as [`RowBlock::squares`] says: all copies begin at a multiple of 128 of the block's rows, and of
/// their tensor's where these are not all alike.
fn in_squares(tensors: &[StoredTensor], copies: &[Piece]) -> bool {
    let rows = |p: &Piece| (tensors[p.tensor].rows(), tensors[p.tensor].rows_of_a_scale());
    are_squares(copies.iter().map(|p| (p, rows(p))))
}

/// Of each copy the tensor's rows, and those that share scales.
fn are_squares<'a>(mut copies: impl Iterator<Item = (&'a Piece, (usize, Option<usize>))>) -> bool {
    let mut at = 0;
    copies.all(|(p, (rows, sharing))| {
        let begins = at % SQUARE == 0;
        at += p.count;
        begins
            && sharing.is_some_and(|sharing| {
                sharing >= rows || sharing == SQUARE && p.step == 1 && p.first.is_multiple_of(SQUARE)
            })
    })
}

/// Bytes of the first `elements` of a tensor's rows, which may be cut there.
pub(super) fn bytes_before(elements: usize, tensor: &StoredTensor, name: &str) -> Result<usize> {
    match tensor.format.block() {
        Some((block, _)) if !elements.is_multiple_of(block) => Err(Error::Unsupported {
            what: format!("tensor `{name}` as {}, cut after {elements} elements of its rows,", tensor.format.name()),
            why: format!("its blocks have {block} elements; load the model with fewer ranks, or quantise it otherwise"),
        }),
        _ => Ok(tensor.format.bytes(elements, tensor.dtype.bytes())),
    }
}

/// Bytes on their way into a buffer from a place on. Devices write whole words, which rows of codes are not.
pub(super) struct Stream<Buf> {
    /// One rank's buffer, or those of all.
    rank: Option<Rank>,
    buf: Buf,
    at: u64,
    held: Vec<u8>,
}

impl<Buf: Clone> Stream<Buf> {
    pub fn new(rank: Option<Rank>, buf: Buf, at: u64) -> Self {
        Self { rank, buf, at, held: Vec::new() }
    }

    pub fn push<B: Backend<Buf = Buf>>(&mut self, l: &mut Loader<'_, B>, bytes: &[u8]) -> Result<()> {
        if self.held.is_empty() && bytes.len().is_multiple_of(4) && bytes.len() >= PIECE / 16 {
            l.write(self.rank, &self.buf, self.at, bytes)?;
            self.at += bytes.len() as u64;
            return Ok(());
        }
        self.held.extend_from_slice(bytes);
        if self.held.len() < PIECE {
            return Ok(());
        }
        let rest = self.held.split_off(self.held.len() / 4 * 4);
        self.finish(l)?;
        self.held = rest;
        Ok(())
    }

    /// Writes what is held.
    pub fn finish<B: Backend<Buf = Buf>>(&mut self, l: &mut Loader<'_, B>) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        l.write(self.rank, &self.buf, self.at, &held)?;
        self.at += held.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_begin_where_scales_do() {
        let piece = |first: usize, count: usize| Piece { tensor: 0, first, step: 1, count, col: 0, skip: 0 };
        let squares = |copies: &[(Piece, usize, usize)]| {
            are_squares(copies.iter().map(|(p, rows, sharing)| (p, (*rows, Some(*sharing)))))
        };
        // Rows of the tensor, and of them those that share scales.
        assert!(squares(&[(piece(0, 200), 200, 128)]));
        assert!(squares(&[(piece(128, 256), 1024, 128), (piece(0, 72), 1024, 128)]));
        assert!(squares(&[(piece(64, 256), 1024, 1024), (piece(3, 5), 8, usize::MAX)]));
        // A block begins within another's 128 rows, a copy within those of its tensor; a scale per row; other steps.
        assert!(!squares(&[(piece(0, 2880), 2880, 128), (piece(0, 128), 128, 128)]));
        assert!(!squares(&[(piece(64, 128), 1024, 128)]));
        assert!(!squares(&[(piece(0, 128), 1024, 1)]));
        assert!(!squares(&[(Piece { step: 2, ..piece(0, 128) }, 1024, 128)]));
        assert!(!are_squares([(&piece(0, 128), (128, None))].into_iter()));
    }
}
