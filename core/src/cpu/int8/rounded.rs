//! Activations rounded to 8 bits.

use std::cell::RefCell;

use crate::cpu::gemm::Product;
use crate::cpu::par;
use crate::cpu::simd::{Isa, dispatch};
use crate::format::{GROUP, round_group};

/// Rows of x that one task rounds.
const TASK: usize = 8;

/// Rows of x as codes and scales, by [`round_group`].
#[derive(Default)]
pub(in crate::cpu) struct Rounded {
    /// `[m, K]`, four columns each.
    codes: Vec<[i8; 4]>,
    /// `[m, K / 32]`.
    scales: Vec<f32>,
    /// `[m, K / 16]`: sums of codes.
    sums: Vec<i32>,
    /// `[m, K / 32]`: sums of codes times their scale, negative.
    shifts: Vec<f32>,
    /// K / 32.
    groups: usize,
}

thread_local! {
    /// Activations of the product that this thread began, kept from call to call.
    pub(in crate::cpu) static ROUNDED: RefCell<Rounded> = RefCell::default();
}

/// A row to fill.
struct Row<'a> {
    codes: &'a mut [[i8; 4]],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    shifts: &'a mut [f32],
}

impl Row<'_> {
    #[inline(always)]
    fn fill(self, x: &[f32]) {
        let x = x.as_chunks::<GROUP>().0;
        let codes = self.codes.as_flattened_mut().as_chunks_mut::<GROUP>().0;
        let sums = self.sums.as_chunks_mut::<2>().0;
        for (g, (x, codes)) in x.iter().zip(codes).enumerate() {
            self.scales[g] = round_group(x, codes);
            for (sum, codes) in sums[g].iter_mut().zip(codes.as_chunks::<{ GROUP / 2 }>().0) {
                *sum = codes.iter().map(|c| i32::from(*c)).sum();
            }
            self.shifts[g] = -(self.scales[g] * (sums[g][0] + sums[g][1]) as f32);
        }
    }
}

impl Rounded {
    /// Rounds all rows of x; K is a multiple of 32.
    ///
    /// # Safety
    /// As for [`crate::cpu::gemm::matmul`].
    pub(in crate::cpu) unsafe fn fill(&mut self, isa: Isa, p: &Product<'_>, threads: usize) {
        let groups = p.k / GROUP;
        self.groups = groups;
        self.codes.resize(p.m * groups * GROUP / 4, [0; 4]);
        self.scales.resize(p.m * groups, 0.0);
        self.sums.resize(p.m * groups * 2, 0);
        self.shifts.resize(p.m * groups, 0.0);
        // Without a column there is nothing to cut into rows.
        let g = groups.max(1);
        let codes = self.codes.chunks_mut(TASK * g * GROUP / 4);
        let parts = codes
            .zip(self.scales.chunks_mut(TASK * g))
            .zip(self.sums.chunks_mut(TASK * g * 2))
            .zip(self.shifts.chunks_mut(TASK * g));
        let tasks: Vec<_> = parts.collect();
        let work = if threads == 1 { 0 } else { 4 * p.m * p.k };
        par::for_each(tasks, work, |task, (((codes, scales), sums), shifts)| {
            let rows = codes
                .chunks_mut(g * GROUP / 4)
                .zip(scales.chunks_mut(g))
                .zip(sums.chunks_mut(2 * g))
                .zip(shifts.chunks_mut(g));
            for (m, (((codes, scales), sums), shifts)) in rows.enumerate() {
                // SAFETY: the caller's contract; row m of x has k elements.
                let x = unsafe { std::slice::from_raw_parts(p.x.wrapping_add((task * TASK + m) * p.x_stride), p.k) };
                let row = Row { codes, scales, sums, shifts };
                dispatch!(isa, |_s| row.fill(x));
            }
        });
    }

    /// Columns `4 i .. 4 i + 4` of row `m`, in memory order.
    ///
    /// # Safety
    /// They exist.
    #[inline(always)]
    pub(super) unsafe fn four(&self, m: usize, i: usize) -> u32 {
        // SAFETY: the caller's contract.
        u32::from_le_bytes(unsafe { self.codes.as_ptr().add(m * self.groups * 8 + i).cast::<[u8; 4]>().read() })
    }

    /// The 32 codes of group `g` of row `m`.
    ///
    /// # Safety
    /// It exists.
    #[inline(always)]
    pub(super) unsafe fn group(&self, m: usize, g: usize) -> *const u8 {
        // SAFETY: the caller's contract.
        unsafe { self.codes.as_ptr().add((m * self.groups + g) * 8).cast() }
    }

    /// Scale of group `g` of row `m`.
    ///
    /// # Safety
    /// It exists.
    #[inline(always)]
    pub(super) unsafe fn scale(&self, m: usize, g: usize) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { *self.scales.get_unchecked(m * self.groups + g) }
    }

    /// Sum of the codes of a half of group `g` of row `m`.
    ///
    /// # Safety
    /// It exists.
    #[inline(always)]
    pub(super) unsafe fn sum(&self, m: usize, g: usize, half: usize) -> i32 {
        // SAFETY: the caller's contract.
        unsafe { *self.sums.get_unchecked((m * self.groups + g) * 2 + half) }
    }

    /// Sum of the codes of group `g` of row `m` times their scale, negative.
    ///
    /// # Safety
    /// It exists.
    #[inline(always)]
    pub(super) unsafe fn shift(&self, m: usize, g: usize) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { *self.shifts.get_unchecked(m * self.groups + g) }
    }
}
