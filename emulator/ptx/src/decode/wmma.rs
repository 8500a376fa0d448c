//! `wmma`: matrices whose place in registers only the machine knows.

use super::Builder;
use super::form::Form;
use super::matrix::{element, shape};
use crate::ParseError;
use crate::code::{Element, Matrix, NOWHERE, Tile, TileProduct};
use crate::syntax::Operand;

/// Registers of a matrix of so many elements: f16 operands have 8 whatever their number, and so every element more than once.
fn registers_of(kind: Element, elements: u32, operand: bool) -> u32 {
    if operand && kind == Element::F16 { 8 } else { elements * kind.bits() / 32 / 32 }
}

impl Builder<'_> {
    pub(super) fn wmma(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let Some(shape) = shape(form).map(|sides| sides.map(|side| side as u32)) else {
            return self.error("a shape wanted");
        };
        let known = matches!(shape, [16, 16, 16] | [8, 32, 16] | [32, 8, 16] | [16, 16, 8]);
        let kinds: Vec<Element> = form.parts[1..].iter().filter_map(|part| element(part)).collect();
        match (form.parts[1], &kinds[..]) {
            _ if !known => self.error("unsupported shape of `wmma`"),
            ("load", [kind]) => self.tile(form, shape, *kind, (&ops[0], &ops[1], ops.get(2))),
            ("store", [kind]) => self.tile(form, shape, *kind, (&ops[1], &ops[0], ops.get(2))),
            ("mma", [d, c]) => self.tile_product(shape, [Element::F16, Element::F16, *c, *d], ops),
            ("mma", [d, a, b, c]) => self.tile_product(shape, [*a, *b, *c, *d], ops),
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
        let (rows, columns, operand) = match form.parts[2] {
            "a" => (m, k, true),
            "b" => (k, n, true),
            _ => (m, n, false),
        };
        let (list, count) = self.registers(registers, "b32")?;
        if count != registers_of(kind, rows * columns, operand) {
            return self.error("registers of `wmma` that do not fit its shape");
        }
        let by_rows = form.has("row");
        let address = self.address(address)?;
        let stride = match stride {
            Some(stride) => self.source(stride, "u32")?,
            None => self.constant(if by_rows { columns } else { rows } as u64),
        };
        let loads = form.parts[1] == "load";
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
        shape: [u32; 3],
        kinds: [Element; 4],
        ops: &[Operand],
    ) -> Result<(), ParseError> {
        self.want(ops, 4, 4)?;
        let [m, n, k] = shape;
        let (mut lists, mut counts) = ([0; 4], [0; 4]);
        // In the order of `kinds`: D is named first, and comes last.
        for (i, (op, elements)) in [(1, m * k), (2, k * n), (3, m * n), (0, m * n)].into_iter().enumerate() {
            (lists[i], counts[i]) = self.registers(&ops[op], "b32")?;
            if counts[i] != registers_of(kinds[i], elements, i < 2) {
                return self.error("registers of `wmma` that do not fit its shape");
            }
        }
        self.push_matrix(Matrix::TileProduct(TileProduct { shape, kinds, lists, counts }), NOWHERE, &[]);
        Ok(())
    }
}
