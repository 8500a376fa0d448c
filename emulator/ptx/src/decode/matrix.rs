//! Instructions on matrices that a warp, or four, hold together.

use super::Builder;
use super::form::Form;
use crate::ParseError;
use crate::code::{Element, Fragment, Matrix, NOWHERE, Op, Product, Space, WarpgroupProduct, ZERO};
use crate::syntax::Operand;

pub(super) fn element(kind: &str) -> Option<Element> {
    Some(match kind {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "f32" => Element::F32,
        "s8" => Element::S8,
        "u8" => Element::U8,
        "s32" => Element::S32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        _ => return None,
    })
}

/// `m16n8k8` in numbers.
pub(super) fn shape(form: &Form) -> Option<[usize; 3]> {
    form.parts[1..].iter().find_map(|part| {
        let (m, rest) = part.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
    })
}

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn matrix(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "ldmatrix" => self.fragment(form, &ops[0], &ops[1], true)?,
            "stmatrix" => self.fragment(form, &ops[1], &ops[0], false)?,
            "movmatrix" => {
                self.want(ops, 2, 2)?;
                let (d, _) = self.destination(&ops[0])?;
                let a = self.source(&ops[1], "b32")?;
                self.push_matrix(Matrix::Transpose, d, &[a]);
            }
            "mma" => self.mma(form, ops)?,
            "wgmma" if form.has("mma_async") => self.wgmma(form, ops)?,
            "wgmma" if form.has("fence") => self.push_matrix(Matrix::WarpgroupFence, NOWHERE, &[]),
            "wgmma" if form.has("commit_group") => self.push_matrix(Matrix::WarpgroupCommit, NOWHERE, &[]),
            "wgmma" if form.has("wait_group") => {
                let n = self.source(&ops[0], "u32")?;
                self.push_matrix(Matrix::WarpgroupWait, NOWHERE, &[n]);
            }
            "wmma" => self.wmma(form, ops)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn push_matrix(&mut self, matrix: Matrix, d: u32, sources: &[u32]) {
        let number = self.program.matrices.len() as u32;
        self.program.matrices.push(matrix);
        self.push(Op::Matrix(number), d, sources);
    }

    pub(super) fn registers(&mut self, operand: &Operand, kind: &str) -> Result<(u32, u32), ParseError> {
        let mut registers = Vec::new();
        for element in self.elements(operand) {
            registers.push(self.source(element, kind)?);
        }
        let count = registers.len() as u32;
        Ok((self.list(&registers), count))
    }

    fn fragment(
        &mut self,
        form: &Form,
        registers: &Operand,
        address: &Operand,
        loads: bool,
    ) -> Result<(), ParseError> {
        if !form.has("m8n8") || !form.has("b16") {
            return self.error("unsupported: matrices of another shape than m8n8 of b16");
        }
        let count = if form.has("x4") {
            4
        } else if form.has("x2") {
            2
        } else {
            1
        };
        let (list, found) = self.registers(registers, "b32")?;
        if found != count {
            return self.error("one register a matrix wanted");
        }
        let address = self.address(address)?;
        let space = if form.space() == Space::Shared { Space::Shared } else { Space::Generic };
        let fragment = Fragment { list, count, transposed: form.has("trans"), space, loads };
        self.push_matrix(Matrix::Fragment(fragment), NOWHERE, &[address.base]);
        if let Some(last) = self.program.code.last_mut() {
            last.offset = address.offset;
        }
        Ok(())
    }

    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c`
    fn mma(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 4, 4)?;
        let kinds: Vec<_> = form.parts[1..].iter().filter_map(|part| element(part)).collect();
        let (Some([16, 8, k]), [d_kind, a_kind, b_kind, c_kind]) = (shape(form), &kinds[..]) else {
            return self.error("unsupported shape or types of `mma`");
        };
        let (k, bits) = (k as u32, a_kind.bits());
        let wanted = [k * bits / 64, k * bits / 128];
        let (d, d_count) = self.registers(&ops[0], "b32")?;
        let (a, a_count) = self.registers(&ops[1], "b32")?;
        let (b, b_count) = self.registers(&ops[2], "b32")?;
        let (c, c_count) = self.registers(&ops[3], "b32")?;
        let sizes = [4 * d_kind.bits() / 32, 4 * c_kind.bits() / 32];
        if [a_count, b_count] != wanted || [d_count, c_count] != sizes || a_kind.bits() != b_kind.bits() {
            return self.error("registers of `mma` that do not fit its shape");
        }
        let product =
            Product { k, a_kind: *a_kind, b_kind: *b_kind, c_kind: *c_kind, d_kind: *d_kind, a, b, c, d };
        self.push_matrix(Matrix::Product(product), NOWHERE, &[]);
        Ok(())
    }

    /// `wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 d, a, b, p, 1, 1, 0, 0`
    fn wgmma(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let kinds: Vec<_> = form.parts[1..].iter().filter_map(|part| element(part)).collect();
        let (Some([64, n, k]), [d_kind, a_kind, b_kind]) = (shape(form), &kinds[..]) else {
            return self.error("unsupported shape or types of `wgmma`");
        };
        self.want(ops, 4, 8)?;
        let (d, d_count) = self.registers(&ops[0], "b32")?;
        if d_count != n as u32 / 2 * d_kind.bits() / 32 || k as u32 * a_kind.bits() != 256 {
            return self.error("registers of `wgmma` that do not fit its shape");
        }
        let (mut a, mut a_count) = (self.list(&[]), 0);
        let mut descriptor = ZERO;
        if let Operand::Vector(_) = &ops[1] {
            (a, a_count) = self.registers(&ops[1], "b32")?;
        } else {
            descriptor = self.source(&ops[1], "u64")?;
        }
        let b = self.source(&ops[2], "u64")?;
        let scale = self.source(&ops[3], "pred")?;
        let mut immediates = Vec::new();
        for operand in &ops[4..] {
            let Operand::Integer(value) = operand else { return self.error("a number wanted") };
            immediates.push(*value as i64);
        }
        let number = |at: usize, plain: i64| immediates.get(at).copied().unwrap_or(plain);
        // With A in registers only B can be transposed.
        let (transpose_a, transpose_b) = match a_count {
            0 => (number(2, 0) == 1, number(3, 0) == 1),
            _ => (false, number(2, 0) == 1),
        };
        let product = WarpgroupProduct {
            n: n as u32,
            k: k as u32,
            kind: *a_kind,
            b_kind: *b_kind,
            d_kind: *d_kind,
            d,
            d_count,
            a,
            a_count,
            negate_a: number(0, 1) == -1,
            negate_b: number(1, 1) == -1,
            transpose_a,
            transpose_b,
        };
        self.push_matrix(Matrix::Warpgroup(product), NOWHERE, &[descriptor, b, scale]);
        Ok(())
    }
}
