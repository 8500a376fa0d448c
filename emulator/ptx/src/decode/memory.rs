//! Loads, stores, atomic operations, and what turns addresses of one space into those of another.

use super::Builder;
use super::form::Form;
use super::names::Symbol;
use crate::ParseError;
use crate::code::{Access, Atomic, Kind, NOWHERE, Op, Order, Preset, Space, Update, ZERO};
use crate::lanes::{convert, logic, map};
use crate::machine::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};
use crate::syntax::{Operand, type_bytes};

impl Form<'_> {
    /// The state space that is named.
    pub(super) fn space(&self) -> Space {
        let named = |part: &&str| match *part {
            "global" | "const" => Some(Space::Global),
            "local" => Some(Space::Local),
            part if part.starts_with("param") => Some(Space::Parameter),
            part if part.starts_with("shared") => Some(Space::Shared),
            _ => None,
        };
        self.parts[1..].iter().find_map(named).unwrap_or(Space::Generic)
    }

    pub(super) fn order(&self, plain: Order) -> Order {
        match () {
            () if self.has("acq_rel") => Order::Both,
            () if self.has("acquire") => Order::Acquire,
            () if self.has("release") => Order::Release,
            () if self.has("relaxed") || self.has("volatile") || self.has("mmio") => Order::Relaxed,
            () => plain,
        }
    }
}

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn memory(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "ld" | "ldu" => self.load(form, ops)?,
            "st" => self.store(form, ops)?,
            "atom" | "red" if !form.has("async") => self.atomic(form, ops)?,
            "cvta" => self.cvta(form, ops)?,
            "isspacep" => {
                self.want(ops, 2, 2)?;
                let (d, _) = self.destination(&ops[0])?;
                let a = self.source(&ops[1], "u64")?;
                self.push(Op::IsSpace(form.space()), d, &[a]);
            }
            "mapa" | "getctarank" => {
                self.want(ops, 2, 3)?;
                let (d, _) = self.destination(&ops[0])?;
                let (a, generic) = (self.source(&ops[1], "u64")?, form.space() == Space::Generic);
                if form.name() == "mapa" {
                    let b = self.source(&ops[2], "u32")?;
                    self.push(Op::MapShared { generic }, d, &[a, b]);
                } else {
                    self.push(Op::RankOfShared { generic }, d, &[a]);
                }
            }
            "fence" | "membar" => {
                let beside = form.has("proxy") && form.has("async") && !form.has("global");
                self.push(if beside { Op::ProxyFence } else { Op::Fence }, ZERO, &[]);
            }
            "prefetch" | "prefetchu" | "discard" | "applypriority" => {
                self.push(Op::Nop, ZERO, &[]);
            }
            "createpolicy" => {
                let (d, _) = self.destination(&ops[0])?;
                self.map(logic::plain("mov", "b64"), d, &[ZERO])?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The space of an access: a function's own parameters lie in local memory.
    fn home(&self, form: &Form, symbol: Option<Symbol>) -> Space {
        match (form.space(), symbol) {
            (_, Some(Symbol::Local(_))) => Space::Local,
            (Space::Generic, Some(Symbol::Shared(_) | Symbol::Dynamic)) => Space::Shared,
            (space, _) => space,
        }
    }

    fn load(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 4)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let address = self.address(&ops[1])?;
        let size = type_bytes(kind).unwrap_or(4);
        if size > 8 {
            return self.error("unsupported: loads of 128-bit elements");
        }
        let mut registers = Vec::new();
        let mut bits = 0;
        for element in self.elements(&ops[0]) {
            let (reg, width) = self.destination(element)?;
            bits = bits.max(if reg == NOWHERE { 0 } else { width });
            registers.push(reg);
        }
        let extend = if kind.starts_with('s') && bits > size * 8 { bits as u8 } else { 0 };
        if let (Space::Parameter, Some(Symbol::Parameter(start))) = (form.space(), address.symbol) {
            return self.parameter(start as i64 + address.offset, size, extend, &registers);
        }
        let space = self.home(form, address.symbol);
        let order = form.order(Order::Weak);
        let (list, count) = (self.list(&registers), registers.len() as u8);
        let access = Access { space, size: size as u8, count, extend, order, list };
        let at = self.push(Op::Load(access), registers[0], &[address.base]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    /// A kernel's parameter at a place that is known: the register holds it from the beginning.
    fn parameter(&mut self, at: i64, size: u32, extend: u8, registers: &[u32]) -> Result<(), ParseError> {
        let end = self.parameters.last().map_or(0, |p| p.offset + p.bytes) as i64;
        if at < 0 || at + size as i64 * registers.len() as i64 > end {
            return self.error("a load outside of the kernel's parameters");
        }
        for (i, &d) in registers.iter().enumerate().filter(|(_, d)| **d != NOWHERE) {
            let offset = at as u32 + i as u32 * size;
            let value = self.preset(Preset::Parameter { offset, size: size as u8, extend });
            self.map(logic::plain("mov", "b64"), d, &[value])?;
        }
        Ok(())
    }

    fn store(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 3)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let address = self.address(&ops[0])?;
        let size = type_bytes(kind).unwrap_or(4);
        if size > 8 {
            return self.error("unsupported: stores of 128-bit elements");
        }
        let mut registers = Vec::new();
        for element in self.elements(&ops[1]) {
            registers.push(self.source(element, kind)?);
        }
        let space = self.home(form, address.symbol);
        let order = form.order(Order::Weak);
        let (list, count) = (self.list(&registers), registers.len() as u8);
        let access = Access { space, size: size as u8, count, extend: 0, order, list };
        let at = self.push(Op::Store(access), NOWHERE, &[address.base, registers[0]]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    fn atomic(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let returns = form.name() == "atom";
        let first = returns as usize;
        self.want(ops, 2 + first, 5)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let update = match form.parts[1..].iter().find_map(|part| update(part)) {
            Some(update) => update,
            None => return self.error("unsupported atomic operation"),
        };
        let size = type_bytes(kind).unwrap_or(4);
        let number = match kind {
            "f16" => Kind::F16,
            "f16x2" => Kind::F16x2,
            "bf16" => Kind::Bf16,
            "bf16x2" => Kind::Bf16x2,
            "f32" => Kind::F32,
            "f64" => Kind::F64,
            kind if kind.starts_with('s') => Kind::Signed,
            _ => Kind::Bits,
        };
        if size > 8 {
            return self.error("unsupported: atomic operations on 128 bits");
        }
        let address = self.address(&ops[first])?;
        let mut values = Vec::new();
        for element in self.elements(&ops[first + 1]) {
            values.push(self.source(element, kind)?);
        }
        let count = values.len();
        let mut destinations = vec![NOWHERE; count];
        if returns {
            let elements = self.elements(&ops[0]);
            for (d, element) in destinations.iter_mut().zip(elements) {
                *d = self.destination(element)?.0;
            }
        }
        let new = if update == Update::Swap { self.source(&ops[first + 2], kind)? } else { ZERO };
        let (d, b) = (destinations[0], values[0]);
        values.extend(destinations);
        let list = self.list(&values);
        let (space, order) = (self.home(form, address.symbol), form.order(Order::Relaxed));
        let atomic =
            Atomic { space, update, kind: number, size: size as u8, order, count: count as u8, list };
        let at = self.push(Op::Atomic(atomic), d, &[address.base, b, new]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    fn cvta(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 2)?;
        let (d, bits) = self.destination(&ops[0])?;
        let a = self.source(&ops[1], "u64")?;
        let window = match form.space() {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Parameter => PARAMETER_WINDOW,
            Space::Global | Space::Generic => 0,
        };
        let window = self.constant(window);
        let wide = if bits == 32 { convert::usual("u32", "u64") } else { logic::plain("mov", "b64") };
        let converted = self.fresh();
        // A null pointer stays one in every space.
        match form.has("to") {
            true => self.push(
                Op::Map(map!((a: u64, b: u64) -> u64 { if a == 0 { 0 } else { a.wrapping_sub(b) } })),
                converted,
                &[a, window],
            ),
            false => self.push(
                Op::Map(map!((a: u64, b: u64) -> u64 { a.wrapping_add(b) })),
                converted,
                &[a, window],
            ),
        };
        self.map(wide, d, &[converted])
    }
}

fn update(part: &str) -> Option<Update> {
    Some(match part {
        "add" => Update::Add,
        "min" => Update::Min,
        "max" => Update::Max,
        "and" => Update::And,
        "or" => Update::Or,
        "xor" => Update::Xor,
        "exch" => Update::Exchange,
        "cas" => Update::Swap,
        "inc" => Update::Increment,
        "dec" => Update::Decrement,
        _ => return None,
    })
}
