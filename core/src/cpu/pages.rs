//! KV pages as the ops see them, in f32 or in 8 bits: `[pages, KH, 64, hd]`, a head and a token at a time.

use super::Buf;
use super::view::{self, Rows, Writer};
use crate::kv8;
use crate::step::PAGE;
use crate::tensor::{DType, Tensor};

/// Pages of keys or of values, to read.
pub(super) enum Pages<'a> {
    Plain(Rows<'a, f32>),
    Coded(Rows<'a, i8>),
}

impl<'a> Pages<'a> {
    pub(super) fn of(pool: &'a Tensor<Buf>) -> Self {
        if pool.dtype == DType::I8 { Self::Coded(view::read(pool)) } else { Self::Plain(view::read(pool)) }
    }

    /// `[64, hd]` of a head, decoded into `room` if need be.
    pub(super) fn head<'s>(&'s self, page: usize, head: usize, hd: usize, room: &'s mut Vec<f32>) -> &'s [f32] {
        match self {
            Self::Plain(rows) => &rows.row(page)[head * PAGE * hd..][..PAGE * hd],
            Self::Coded(rows) => {
                let bytes = kv8::span(DType::I8, hd);
                kv8::decode(&rows.row(page)[head * bytes..][..bytes], room);
                room
            }
        }
    }
}

/// Pages of keys or of values, to write.
pub(super) enum PagesMut<'a> {
    Plain(Writer<'a, f32>),
    Coded(Writer<'a, i8>),
}

impl<'a> PagesMut<'a> {
    pub(super) fn of(pool: &'a Tensor<Buf>) -> Self {
        if pool.dtype == DType::I8 { Self::Coded(view::write(pool)) } else { Self::Plain(view::write(pool)) }
    }

    /// Stores a token of a head.
    pub(super) fn put(&mut self, row: &[f32], page: usize, head: usize, slot: usize) {
        match self {
            Self::Plain(pages) => {
                pages.rows().row_mut(page)[(head * PAGE + slot) * row.len()..][..row.len()].copy_from_slice(row);
            }
            Self::Coded(pages) => {
                let bytes = kv8::span(DType::I8, row.len());
                kv8::put(row, slot, &mut pages.rows().row_mut(page)[head * bytes..][..bytes]);
            }
        }
    }
}
