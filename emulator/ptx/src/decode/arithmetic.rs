//! Instructions that are computed lane by lane: which map carries each out.

use super::{Builder, Form};
use crate::ParseError;
use crate::code::{APPROXIMATE, MOVE, NOWHERE, Op, Reg, ZERO};
use crate::lanes::approximate::APPROXIMATIONS;
use crate::lanes::round::Mode;
use crate::lanes::{Map, compare, convert, float, half, integer};
use crate::syntax::{Operand, type_bytes};

/// Shift amounts, positions and the like are `u32` whatever the instruction's type is.
fn source_kind<'k>(name: &str, at: usize, kind: &'k str) -> &'k str {
    match (name, at) {
        ("shl" | "shr", 1) | ("bfe", 1 | 2) | ("bfi", 2 | 3) | ("lop3", _) => "u32",
        ("selp", 2) => "pred",
        ("fns", 2) => "s32",
        _ => kind,
    }
}

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn arithmetic(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "setp" => self.setp(form, ops)?,
            "set" => self.set(form, ops)?,
            "slct" => self.slct(form, ops)?,
            "testp" => self.testp(form, ops)?,
            "cvt" => self.cvt(form, ops)?,
            "dp4a" | "dp2a" => self.dot(form, ops)?,
            "lop3" if form.has("or") || form.has("and") => self.logic_and_test(form, ops)?,
            name if name.starts_with('v') && name != "vote" => return self.video(form, ops),
            "mov" => return self.mov(form, ops),
            "add" | "sub" | "mad" | "addc" | "subc" | "madc"
                if form.has("cc") || form.name().ends_with('c') =>
            {
                self.carried(form, ops)?;
            }
            _ => return self.simple(form, ops),
        }
        Ok(true)
    }

    /// Adds the instruction of a map.
    pub(super) fn map(&mut self, map: Option<Map>, d: Reg, sources: &[Reg]) -> Result<(), ParseError> {
        let Some(map) = map else { return self.error("unsupported type or modifier") };
        self.push(Op::Map(map), d, sources);
        Ok(())
    }

    fn simple(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        let Some(kind) = form.kind() else { return Ok(false) };
        let Some(map) = find(form, kind) else { return Ok(false) };
        if !(2..=5).contains(&ops.len()) {
            return self.malformed(&format!("{} operands where 2 to 5 are wanted", ops.len()));
        }
        let of_two = ["add", "sub", "mul", "min", "max", "div", "rem", "and", "or", "xor", "shl", "shr"];
        if ops.len() > 3 && of_two.contains(&form.name()) {
            return self.error("unsupported: three sources");
        }
        let (d, _) = self.destination(&ops[0])?;
        let wide = form.has("wide");
        let mut sources = Vec::new();
        for (at, operand) in ops[1..].iter().enumerate() {
            let kind = match (wide && at == 2, kind) {
                (true, "u16" | "s16") => "u32",
                (true, _) => "u64",
                _ => source_kind(form.name(), at, kind),
            };
            sources.push(self.source(operand, kind)?);
        }
        let at = self.push(Op::Map(map), d, &sources);
        if kind == "f32" && (form.has("approx") || form.has("full")) {
            let number = APPROXIMATIONS.iter().position(|found| found.name == form.name());
            self.program.code[at].offset = number.map_or(0, |number| APPROXIMATE + number as i64);
        }
        Ok(true)
    }

    /// Sums with a carry in or out, which is a register that no name has.
    fn carried(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let kind = form.kind().unwrap_or("u32");
        let bits = type_bytes(kind).unwrap_or(4) * 8;
        let unsigned = if bits == 64 { "u64" } else { "u32" };
        let (d, _) = self.destination(&ops[0])?;
        let (name, takes) = match form.name() {
            "addc" | "subc" | "madc" => (&form.name()[..3], true),
            name => (name, false),
        };
        let mut sources = Vec::new();
        for operand in &ops[1..] {
            sources.push(self.source(operand, kind)?);
        }
        if name == "mad" {
            let [a, b, c] = sources[..] else { return self.error("three sources wanted") };
            let product = self.fresh();
            let half = if form.has("hi") { "mul.hi" } else { "mul.lo" };
            self.map(integer::plain(half, kind), product, &[a, b])?;
            sources = vec![product, c];
        }
        let [a, b] = sources[..] else { return self.error("two sources wanted") };
        let carry = match self.carry {
            Some(carry) => carry,
            None => self.fresh(),
        };
        self.carry = Some(carry);
        let subtract = name == "sub";
        let carried = if takes { carry } else { self.constant(subtract as u64) };
        // Both read the carry that came in, and the destination may be a source.
        let (sum, out) = (self.fresh(), self.fresh());
        self.push(Op::Map(integer::with_carry(subtract, bits)), sum, &[a, b, carried]);
        if form.has("cc") {
            self.push(Op::Map(integer::carry(subtract, bits)), out, &[a, b, carried]);
            self.map(integer::bits("mov", "pred"), carry, &[out])?;
        }
        self.map(integer::bits("mov", unsigned), d, &[sum])
    }

    fn dot(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 4, 4)?;
        let [a, b] = form.kinds()[..] else { return self.error("two types wanted") };
        let (d, _) = self.destination(&ops[0])?;
        let sources =
            [self.source(&ops[1], "b32")?, self.source(&ops[2], "b32")?, self.source(&ops[3], "s32")?];
        self.map(integer::dot(form.name(), form.has("hi"), a, b), d, &sources)
    }

    /// `lop3.or.b32 d|p, a, b, c, table, q`: `p` is whether the result has a bit, joined with `q`.
    fn logic_and_test(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 6, 6)?;
        let Operand::Pair(d, p) = &ops[0] else { return self.error("a result and a predicate wanted") };
        let (d, p) = (self.destination(d)?.0, self.destination(p)?.0);
        let mut sources = [ZERO; 4];
        for (source, operand) in sources.iter_mut().zip(&ops[1..5]) {
            *source = self.source(operand, "b32")?;
        }
        let q = self.source(&ops[5], "pred")?;
        let (result, test) = (self.fresh(), self.fresh());
        self.map(integer::bits("lop3", "b32"), result, &sources)?;
        self.map(compare::plain("ne", "b32", false), test, &[result, ZERO])?;
        self.predicates(form, test, Some(q), [Some(p), None])?;
        self.map(integer::bits("mov", "b32"), d, &[result])
    }

    /// The comparison itself: into `d`, then joined with a predicate if there is one.
    fn compared(&mut self, form: &Form, kind: &str, sources: [Reg; 2]) -> Result<Reg, ParseError> {
        let test = form.part(1);
        let d = self.fresh();
        self.map(compare::plain(test, kind, form.has("ftz")), d, &sources)?;
        Ok(d)
    }

    fn joint<'f>(&self, form: &Form<'f>) -> Option<&'f str> {
        form.parts[1..].iter().copied().find(|part| matches!(*part, "and" | "or" | "xor"))
    }

    /// `p` and, inverted before it is joined with `c`, `q`.
    fn predicates(
        &mut self,
        form: &Form,
        test: Reg,
        c: Option<Reg>,
        d: [Option<Reg>; 2],
    ) -> Result<(), ParseError> {
        let mut results = Vec::new();
        for (d, inverted) in [(d[0], false), (d[1], true)] {
            let Some(d) = d else { continue };
            let (mut value, result) = (test, self.fresh());
            if inverted {
                value = self.fresh();
                self.map(integer::bits("not", "pred"), value, &[test])?;
            }
            match (c, self.joint(form)) {
                (Some(c), Some(join)) => self.map(integer::bits(join, "pred"), result, &[value, c])?,
                _ => self.map(integer::bits("mov", "pred"), result, &[value])?,
            }
            results.push((d, result));
        }
        for (d, result) in results {
            self.map(integer::bits("mov", "pred"), d, &[result])?;
        }
        Ok(())
    }

    fn setp(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 4)?;
        let kind = form.kind().unwrap_or("b32");
        let sources = [self.source(&ops[1], kind)?, self.source(&ops[2], kind)?];
        let c = if ops.len() > 3 { Some(self.source(&ops[3], "pred")?) } else { None };
        let (first, second) = match &ops[0] {
            Operand::Pair(p, q) => (self.destination(p)?.0, Some(self.destination(q)?.0)),
            p => (self.destination(p)?.0, None),
        };
        if kind == "f16x2" || kind == "bf16x2" {
            // One predicate a half, the lower first.
            let halves = self.halves(kind, sources)?;
            for (test, d) in halves.into_iter().zip([Some(first), second]) {
                let found = self.compared(form, &kind[..kind.len() - 2], test)?;
                self.predicates(form, found, c, [d, None])?;
            }
            return Ok(());
        }
        if second.is_none() && c.is_none() {
            return self.map(compare::plain(form.part(1), kind, form.has("ftz")), first, &sources);
        }
        let test = self.compared(form, kind, sources)?;
        let wanted = |d: Reg| (d != NOWHERE).then_some(d);
        self.predicates(form, test, c, [wanted(first), second.and_then(wanted)])
    }

    /// The lower and the upper halves of two packed sources.
    fn halves(&mut self, kind: &str, sources: [Reg; 2]) -> Result<[[Reg; 2]; 2], ParseError> {
        let _ = kind;
        let sixteen = self.constant(16);
        let mut halves = [sources, sources];
        for (i, source) in sources.into_iter().enumerate() {
            halves[0][i] = self.fresh();
            self.map(integer::bits("mov", "b16"), halves[0][i], &[source])?;
            halves[1][i] = self.fresh();
            self.map(integer::bits("shr", "u32"), halves[1][i], &[source, sixteen])?;
        }
        Ok(halves)
    }

    fn set(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 4)?;
        let [to, from] = form.kinds()[..] else { return self.error("two types wanted") };
        let (d, _) = self.destination(&ops[0])?;
        let sources = [self.source(&ops[1], from)?, self.source(&ops[2], from)?];
        let c = if ops.len() > 3 { Some(self.source(&ops[3], "pred")?) } else { None };
        let packed = from.ends_with("x2");
        let (element, tests) = match packed {
            true => (&from[..from.len() - 2], self.halves(from, sources)?.to_vec()),
            false => (from, vec![sources]),
        };
        let result = match packed {
            true => to.strip_suffix("x2").unwrap_or("u16"),
            false => to,
        };
        let mut made = Vec::new();
        for test in tests {
            let found = self.compared(form, element, test)?;
            let (joined, spread) = (self.fresh(), self.fresh());
            self.predicates(form, found, c, [Some(joined), None])?;
            self.map(compare::spread(result), spread, &[joined])?;
            made.push(spread);
        }
        if let [low, high] = made[..] {
            let (sixteen, upper) = (self.constant(16), self.fresh());
            self.map(integer::bits("shl", "b32"), upper, &[high, sixteen])?;
            return self.map(integer::bits("or", "b32"), d, &[low, upper]);
        }
        let width = if matches!(result, "u16" | "s16" | "f16" | "bf16") { "b16" } else { "b32" };
        self.map(integer::bits("mov", width), d, &made)
    }

    fn slct(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 4, 4)?;
        let [kind, test] = form.kinds()[..] else { return self.error("two types wanted") };
        let (d, _) = self.destination(&ops[0])?;
        let sources = [self.source(&ops[1], kind)?, self.source(&ops[2], kind)?, self.source(&ops[3], test)?];
        let bits = type_bytes(kind).unwrap_or(4) * 8;
        self.map(compare::select(bits, test, form.has("ftz")), d, &sources)
    }

    fn testp(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 2)?;
        let kind = form.kind().unwrap_or("f32");
        let (d, _) = self.destination(&ops[0])?;
        let a = self.source(&ops[1], kind)?;
        self.map(compare::class(form.part(1), kind), d, &[a])
    }

    fn cvt(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 4)?;
        let kinds = form.kinds();
        let (d, bits) = self.destination(&ops[0])?;
        if form.has("pack") {
            let sources = ops[1..].iter().map(|o| self.source(o, "b32")).collect::<Result<Vec<_>, _>>()?;
            return self.map(convert::pack(kinds.first().unwrap_or(&""), ops.len() > 3), d, &sources);
        }
        let [to, from] = kinds[..] else { return self.error("two types wanted") };
        let mut sources = ops[1..].iter().map(|o| self.source(o, from)).collect::<Result<Vec<_>, _>>()?;
        if let (true, Some(clamp)) = (form.has("satfinite"), convert::to_finite(to, from)) {
            for source in &mut sources {
                let clamped = self.fresh();
                self.map(Some(clamp), clamped, &[*source])?;
                *source = clamped;
            }
        }
        let relu = form.has("relu");
        if to.ends_with("x2") || from.ends_with("x2") {
            let zero = form.mode() == Some(Mode::Zero);
            let map = convert::f8_pairs(to, from, relu).or_else(|| convert::halves(to, zero, relu));
            return self.map(map, d, &sources);
        }
        if let (Some(map), false) = (convert::usual(to, from), form.has("sat")) {
            return self.map(Some(map), d, &sources);
        }
        self.converted(form, [to, from], (d, bits), sources[0])
    }

    fn converted(
        &mut self,
        form: &Form,
        [to, from]: [&str; 2],
        d: (Reg, u32),
        a: Reg,
    ) -> Result<(), ParseError> {
        let mode = form.mode().unwrap_or(if to.starts_with(['u', 's']) { Mode::Zero } else { Mode::Nearest });
        let mut flags = convert::flags(mode, form.has("ftz"), form.has("sat"), form.has("relu"));
        if ["rni", "rzi", "rmi", "rpi"].iter().any(|r| form.has(r)) {
            flags |= convert::WHOLE;
        }
        let flags = self.constant(flags);
        match convert::extend(to, d.1) {
            Some(extend) => {
                let narrow = self.fresh();
                self.map(convert::plain(to, from), narrow, &[a, ZERO, ZERO, flags])?;
                self.map(Some(extend), d.0, &[narrow])
            }
            None => self.map(convert::plain(to, from), d.0, &[a, ZERO, ZERO, flags]),
        }
    }

    /// Moves, also of several registers into one and back.
    fn mov(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        self.want(ops, 2, 2)?;
        let kind = form.kind().unwrap_or("b32");
        if form.has("v2") || form.has("v4") {
            return self.error("unsupported: registers that are vectors");
        }
        if kind == "b128" {
            return self.mov_wide(ops).map(|()| true);
        }
        if let Operand::Vector(parts) = &ops[0] {
            let source = self.source(&ops[1], kind)?;
            self.unpack(kind, parts, source)?;
            return Ok(true);
        }
        let (d, _) = self.destination(&ops[0])?;
        if let Operand::Vector(parts) = &ops[1] {
            self.pack(kind, d, parts)?;
            return Ok(true);
        }
        let source = self.source(&ops[1], kind)?;
        self.map(integer::bits("mov", kind), d, &[source])?;
        if let Some(last) = self.program.code.last_mut() {
            last.offset = MOVE;
        }
        Ok(true)
    }

    /// `mov.b128 d, {a, b}`, `mov.b128 {a, b}, d`, `mov.b128 d, a`
    fn mov_wide(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
        let (to, from) = (self.words(&ops[0])?, self.words(&ops[1])?);
        let (&[d, e], &[a, b]) = (&to[..], &from[..]) else { return self.error("two words wanted") };
        let copy = self.fresh();
        self.map(integer::bits("mov", "b64"), copy, &[b])?;
        self.map(integer::bits("mov", "b64"), d, &[a])?;
        self.map(integer::bits("mov", "b64"), e, &[copy])
    }

    fn unpack(&mut self, kind: &str, parts: &[Operand], source: Reg) -> Result<(), ParseError> {
        let bits = type_bytes(kind).unwrap_or(4) * 8 / parts.len() as u32;
        // A part may be the source's own register.
        let copy = self.fresh();
        self.map(integer::bits("mov", kind), copy, &[source])?;
        for (i, part) in parts.iter().enumerate() {
            let (d, _) = self.destination(part)?;
            if d == NOWHERE {
                continue;
            }
            let (shifted, by) = (self.fresh(), self.constant(bits as u64 * i as u64));
            self.map(integer::bits("shr", "u64"), shifted, &[copy, by])?;
            match bits {
                8 => self.map(convert::plain("u8", "u64"), d, &[shifted])?,
                bits => {
                    self.map(integer::bits("mov", if bits == 16 { "b16" } else { "b32" }), d, &[shifted])?
                }
            }
        }
        Ok(())
    }

    fn pack(&mut self, kind: &str, d: Reg, parts: &[Operand]) -> Result<(), ParseError> {
        let bits = type_bytes(kind).unwrap_or(4) * 8 / parts.len() as u32;
        let part_kind = ["b8", "b16", "b32"][(bits.ilog2() as usize).saturating_sub(3).min(2)];
        let mut whole = ZERO;
        for (i, part) in parts.iter().enumerate() {
            let source = self.source(part, part_kind)?;
            let (narrow, shifted, joined) = (self.fresh(), self.fresh(), self.fresh());
            self.map(convert::plain(&part_kind.replace('b', "u"), "u64"), narrow, &[source])?;
            let by = self.constant(bits as u64 * i as u64);
            self.map(integer::bits("shl", "b64"), shifted, &[narrow, by])?;
            self.map(integer::bits("or", "b64"), joined, &[whole, shifted])?;
            whole = joined;
        }
        self.map(integer::bits("mov", kind), d, &[whole])
    }
}

/// The map of an instruction that needs no more than its types.
fn find(form: &Form, kind: &str) -> Option<Map> {
    let (ftz, sat) = (form.has("ftz"), form.has("sat"));
    let mode = form.mode().unwrap_or(Mode::Nearest);
    let approximate = form.has("approx");
    match kind {
        "f32" if approximate => float::f32_approximate(form.name(), ftz, sat),
        "f32" if form.has("full") => float::f32_approximate("div.full", ftz, sat),
        "f32" => {
            let key = form.key(&["sat"]);
            float::f32_rounded(&key, if key == "mad" { Mode::Nearest } else { mode }, ftz, sat)
                .or_else(|| float::f32_exact(&key, ftz))
                .or_else(|| integer::bits(&key, kind))
                .or_else(|| (key == "mad").then(|| float::f32_rounded("fma", mode, ftz, sat)).flatten())
        }
        "f64" if approximate && form.name() == "rsqrt" && ftz => float::f64_exact("rsqrt.approx.ftz"),
        "f64" if approximate => float::f64_exact(&form.key(&[])),
        "f64" => {
            let key = form.key(&[]);
            let key = if key == "mad" { "fma" } else { key.as_str() };
            float::f64_rounded(key, mode)
                .or_else(|| float::f64_exact(key))
                .or_else(|| integer::bits(key, kind))
        }
        "f16" | "f16x2" | "bf16" | "bf16x2" => {
            let key = form.key(&["sat", "approx"]);
            half::plain(&key, kind, ftz, sat).or_else(|| integer::bits(&key, kind))
        }
        _ => {
            let key = form.key(&[]);
            integer::plain(&key, kind).or_else(|| integer::bits(&key, kind))
        }
    }
}
