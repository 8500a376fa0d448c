//! Instructions on matrices that a warp, or four, hold together: `ldmatrix`, `mma`, `wgmma`, `wmma`; and which
//! instructions touch registers of a `wgmma` that may be under way.

use super::{Builder, Form};
use crate::ParseError;
use crate::code::{
    Element, Fragment, Instruction, MOVE, Matrix, NOWHERE, Op, Pairing, Product, Space, SparseProduct, Tile,
    TileProduct, WarpgroupProduct, ZERO,
};
use crate::syntax::Operand;

pub(super) fn element(kind: &str) -> Option<Element> {
    Some(match kind {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "f32" => Element::F32,
        "f64" => Element::F64,
        "b1" => Element::B1,
        "s4" => Element::S4,
        "u4" => Element::U4,
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
        let sparse = form.begins("sp");
        let operands = if sparse { 6 } else { 4 };
        self.want(ops, operands, operands)?;
        let kinds: Vec<_> = form.parts[1..].iter().filter_map(|part| element(part)).collect();
        let (Some([m @ (8 | 16), 8, k]), &[d_kind, a_kind, b_kind, c_kind]) = (shape(form), &kinds[..])
        else {
            return self.error("unsupported shape or types of `mma`");
        };
        // What is there of a sparse A is half as deep.
        let (m, k) = (m as u32, if sparse { k as u32 / 2 } else { k as u32 });
        // Products of f16 by quarters of a warp, of Volta, have another layout.
        let whole = k * a_kind.bits() >= 128 && (m == 16 || a_kind.is_whole() || a_kind == Element::F64);
        if !whole {
            return self.error("unsupported: this shape of `mma`");
        }
        let (pairing, saturate) = (pairing(form), form.has("satfinite"));
        let [(d, d_count), (a, a_count), (b, b_count), (c, c_count)] = {
            let mut lists = [(0, 0); 4];
            for (list, (op, kind)) in lists.iter_mut().zip(ops.iter().zip([d_kind, a_kind, b_kind, c_kind])) {
                *list = self.registers(op, if kind == Element::F64 { "f64" } else { "b32" })?;
            }
            lists
        };
        let product = Product { m, k, pairing, saturate, a_kind, b_kind, c_kind, d_kind, a, b, c, d };
        let counts = [a_count, b_count, c_count, d_count];
        if sparse {
            return self.sparse(product, counts, form.has("sp::ordered_metadata"), (&ops[4], &ops[5]));
        }
        if counts != product.counts() || a_kind.bits() != b_kind.bits() {
            return self.error("registers of `mma` that do not fit its shape");
        }
        self.push_matrix(Matrix::Product(product), NOWHERE, &[]);
        Ok(())
    }

    /// `mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 d, a, b, c, metadata, 0`
    fn sparse(
        &mut self,
        half: Product,
        counts: [u32; 4],
        ordered: bool,
        (metadata, selector): (&Operand, &Operand),
    ) -> Result<(), ParseError> {
        let metadata = self.source(metadata, "b32")?;
        let &Operand::Integer(selector) = selector else { return self.error("a number wanted") };
        let sparse = SparseProduct { half, metadata, selector: selector as u32, ordered };
        // Where all four lanes hold metadata it lies in another way.
        if half.m != 16 || !matches!(sparse.holders(), 1 | 2) || half.a_kind == Element::B1 {
            return self.error("unsupported: this shape of `mma.sp`");
        }
        if counts != sparse.counts() || half.a_kind.bits() != half.b_kind.bits() {
            return self.error("registers of `mma.sp` that do not fit its shape");
        }
        if sparse.selector >= 4 / sparse.holders() {
            return self.error("a selector of `mma.sp` that names no lanes");
        }
        self.push_matrix(Matrix::SparseProduct(sparse), NOWHERE, &[metadata]);
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

/// Registers of a matrix of so many elements: f16 operands have 8 whatever their number, and so every element more
/// than once.
fn registers_of(kind: Element, elements: u32, operand: bool) -> u32 {
    if operand && kind == Element::F16 { 8 } else { elements * kind.bits() / kind.bits().max(32) / 32 }
}

/// How a product joins its elements.
fn pairing(form: &Form) -> Pairing {
    match () {
        () if form.has("xor") => Pairing::Xor,
        () if form.has("and") => Pairing::And,
        () => Pairing::Product,
    }
}

impl Builder<'_> {
    pub(super) fn wmma(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let Some(shape) = shape(form).map(|sides| sides.map(|side| side as u32)) else {
            return self.error("a shape wanted");
        };
        let known = [[16, 16, 16], [8, 32, 16], [32, 8, 16], [16, 16, 8], [8, 8, 4], [8, 8, 32], [8, 8, 128]];
        let kinds: Vec<Element> = form.parts[1..].iter().filter_map(|part| element(part)).collect();
        match (form.part(1), &kinds[..]) {
            _ if !known.contains(&shape) => self.error("unsupported shape of `wmma`"),
            ("load", [kind]) => self.tile(form, shape, *kind, (&ops[0], &ops[1], ops.get(2))),
            ("store", [kind]) => self.tile(form, shape, *kind, (&ops[1], &ops[0], ops.get(2))),
            ("mma", [d, c]) => self.tile_product(form, shape, [Element::F16, Element::F16, *c, *d], ops),
            ("mma", [d, a, b, c]) => self.tile_product(form, shape, [*a, *b, *c, *d], ops),
            _ => self.error("unsupported types of `wmma`"),
        }
    }

    /// `wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {registers}, [address], stride`
    fn tile(
        &mut self,
        form: &Form,
        [m, n, k]: [u32; 3],
        kind: Element,
        (registers, address, stride): (&Operand, &Operand, Option<&Operand>),
    ) -> Result<(), ParseError> {
        let (rows, columns, operand) = match form.part(2) {
            "a" => (m, k, true),
            "b" => (k, n, true),
            _ => (m, n, false),
        };
        let (list, count) = self.registers(registers, if kind == Element::F64 { "f64" } else { "b32" })?;
        if count != registers_of(kind, rows * columns, operand) {
            return self.error("registers of `wmma` that do not fit its shape");
        }
        let by_rows = form.has("row");
        let address = self.address(address)?;
        let stride = match stride {
            Some(stride) => self.source(stride, "u32")?,
            None => self.constant(if by_rows { columns } else { rows } as u64),
        };
        let loads = form.part(1) == "load";
        let tile = Tile { kind, rows, columns, by_rows, space: form.space(), list, count, loads };
        self.push_matrix(Matrix::Tile(tile), NOWHERE, &[address.base, stride]);
        if let Some(last) = self.program.code.last_mut() {
            last.offset = address.offset;
        }
        Ok(())
    }

    /// `wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {d}, {a}, {b}, {c}`
    fn tile_product(
        &mut self,
        form: &Form,
        shape: [u32; 3],
        kinds: [Element; 4],
        ops: &[Operand],
    ) -> Result<(), ParseError> {
        self.want(ops, 4, 4)?;
        let [m, n, k] = shape;
        let (mut lists, mut counts) = ([0; 4], [0; 4]);
        // In the order of `kinds`: D is named first, and comes last.
        for (i, (op, elements)) in [(1, m * k), (2, k * n), (3, m * n), (0, m * n)].into_iter().enumerate() {
            let kind = if kinds[i] == Element::F64 { "f64" } else { "b32" };
            (lists[i], counts[i]) = self.registers(&ops[op], kind)?;
            if counts[i] != registers_of(kinds[i], elements, i < 2) {
                return self.error("registers of `wmma` that do not fit its shape");
            }
        }
        let (pairing, saturate) = (pairing(form), form.has("satfinite"));
        let product = TileProduct { shape, pairing, saturate, kinds, lists, counts };
        self.push_matrix(Matrix::TileProduct(product), NOWHERE, &[]);
        Ok(())
    }
}

impl Builder<'_> {
    /// Marks instructions with an accumulator or a fragment of a `wgmma`, or with what such a register is moved to or
    /// from.
    pub(super) fn watch(&mut self) {
        let mut watched = vec![false; self.program.registers as usize];
        for matrix in &self.program.matrices {
            if let Matrix::Warpgroup(p) = matrix {
                self.mark(&mut watched, p.d, p.d_count);
                self.mark(&mut watched, p.a, p.a_count);
            }
        }
        if !watched.contains(&true) {
            return;
        }
        let mut preset = vec![false; watched.len()];
        self.program.presets.iter().for_each(|(reg, _)| preset[*reg as usize] = true);
        let moves = |i: &&Instruction| {
            i.offset == MOVE && matches!(i.op, Op::Map(_)) && i.d != NOWHERE && !preset[i.a as usize]
        };
        let moves: Vec<(usize, usize)> =
            self.program.code.iter().filter(moves).map(|i| (i.a as usize, i.d as usize)).collect();
        let mut more = true;
        while std::mem::take(&mut more) {
            for &(a, d) in moves.iter() {
                more |= watched[a] != watched[d];
                (watched[a], watched[d]) = (watched[a] | watched[d], watched[a] | watched[d]);
            }
        }
        let program = &mut self.program;
        for i in &mut program.code {
            let list = match i.op {
                Op::Load(access) | Op::Store(access) => {
                    &program.lists[access.list as usize..][..access.count as usize]
                }
                Op::Matrix(number) => match program.matrices[number as usize] {
                    Matrix::Fragment(f) => &program.lists[f.list as usize..][..f.count as usize],
                    _ => &[],
                },
                _ => &[],
            };
            let mut registers = [i.d, i.a, i.b, i.c, i.e].into_iter().chain(list.iter().copied());
            i.watched = registers.any(|reg| watched.get(reg as usize) == Some(&true));
        }
    }
}
