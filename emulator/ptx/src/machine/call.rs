//! Calls of device functions, and of those that CUDA's device runtime provides: `printf`, `assert`, `malloc`, `free`.

use super::state::{Machine, Next, Outcome, Region, Warp, space_of, within};
use crate::FaultKind;
use crate::code::{
    CallSite, Callee, CalleeKind, FRAME_ALIGN, Frame, Instruction, Op, Reg, Slot, StackOp, function_number,
};
use crate::lanes::{LANES, lanes};

/// The longest text that is read from a kernel.
const TEXT_MAX: usize = 1 << 16;

impl Machine<'_> {
    pub(crate) fn call(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        number: u32,
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        let program = self.program;
        let call = &program.calls[number as usize];
        warp.move_to(active, pc + 1);
        for l in lanes(mask) {
            let callee = match call.callee {
                Some(callee) => callee,
                None => self.pointed_at(warp, i, l, call)?,
            };
            let function = &program.callees[callee as usize];
            match function.kind {
                CalleeKind::Code(start) => {
                    let base = self.frame(warp, i, l, function)?;
                    for (from, to) in call.arguments.iter().zip(&function.parameters) {
                        let from = warp.place(l, *from);
                        let to_frame = if to.frame == function.frame_register() { base } else { 0 };
                        self.copy_local(warp, l, to_frame + to.offset, from, to.bytes);
                    }
                    warp.enter(l, function.frame, base);
                    warp.calls[l].extend([callee, pc]);
                    warp.pc[l] = start;
                    warp.deep = true;
                }
                CalleeKind::Print => {
                    let written = self.print(warp, i, l, &call.arguments)?;
                    self.give(warp, l, &call.results, written as u64);
                }
                CalleeKind::Allocate => {
                    let bytes = self.argument(warp, l, &call.arguments, 0, 8);
                    let address = self.spaces[0].allocate(bytes).unwrap_or(0);
                    self.give(warp, l, &call.results, address);
                }
                CalleeKind::Free => {
                    let address = self.argument(warp, l, &call.arguments, 0, 8);
                    if address != 0
                        && let Err(fault) = self.spaces[0].free(address)
                    {
                        return self.fault(fault.kind, warp, i, l, fault.message);
                    }
                }
                CalleeKind::Assert => return self.asserted(warp, i, l, &call.arguments),
                CalleeKind::Missing => {
                    let message =
                        format!("call of `{}`, which is no function that the module defines", function.name);
                    return self.fault(FaultKind::Unsupported, warp, i, l, message);
                }
            }
        }
        Ok(Next::Apart)
    }

    /// Lanes return from a function, or end if they are in the kernel itself.
    pub(crate) fn return_lanes(&mut self, warp: &mut Warp, pc: u32, mask: u32, active: u32) -> Outcome<Next> {
        let program = self.program;
        warp.move_to(active & !mask, pc + 1);
        for l in lanes(mask) {
            let (Some(from), Some(callee)) = (warp.calls[l].pop(), warp.calls[l].pop()) else {
                warp.live &= !(1 << l);
                continue;
            };
            let Op::Call(number) = program.code[from as usize].op else { continue };
            let (call, function) = (&program.calls[number as usize], &program.callees[callee as usize]);
            let base = function.frame.map_or(0, |frame| warp.get(frame.register)[l] as u32);
            warp.leave(l, function.frame);
            for (&to, result) in call.results.iter().zip(&function.returns) {
                let to = warp.place(l, to);
                self.copy_local(warp, l, to, base + result.offset, result.bytes);
            }
            warp.pc[l] = from + 1;
        }
        warp.deep = lanes(warp.live).any(|l| !warp.calls[l].is_empty());
        Ok(Next::Apart)
    }

    /// The function whose address a call has in `a`.
    fn pointed_at(&self, warp: &Warp, i: &Instruction, lane: usize, call: &CallSite) -> Outcome<u32> {
        let address = warp.get(i.a)[lane];
        let number = function_number(address).and_then(|n| self.program.functions.get(n));
        let Some((&number, function)) =
            number.and_then(|n| Some((n, self.program.callees.get(*n as usize)?)))
        else {
            let what = match address {
                0 => "call of a null pointer to a function".into(),
                _ => format!("call of {address:#x}, which is no address of a function that the module takes"),
            };
            return self.fault(FaultKind::InvalidCall, warp, i, lane, what);
        };
        let bytes = |slots: &[Slot]| slots.iter().map(|slot| slot.bytes).collect::<Vec<_>>();
        for (verb, given, wanted) in
            [("takes", &call.arguments, &function.parameters), ("returns", &call.results, &function.returns)]
        {
            if matches!(function.kind, CalleeKind::Code(_)) && bytes(given) != bytes(wanted) {
                let message = format!(
                    "call of `{}` as if it were another function: it {verb} values of {:?} bytes, the call's are of {:?}",
                    function.name,
                    bytes(wanted),
                    bytes(given)
                );
                return self.fault(FaultKind::InvalidCall, warp, i, lane, message);
            }
        }
        Ok(number)
    }

    /// Where the frame of a lane's next call begins, if the function has one; nothing has been written there.
    fn frame(&self, warp: &mut Warp, i: &Instruction, lane: usize, function: &Callee) -> Outcome<u32> {
        let Some(frame) = &function.frame else { return Ok(0) };
        let base = warp.stack[lane].next_multiple_of(frame.align);
        let left = self.program.local_bytes.saturating_sub(base);
        if frame.bytes > left {
            let depth = warp.calls[lane].len() / 2;
            let message = format!(
                "call of `{}` needs {} bytes, {depth} calls deep, where {left} of the {} of the stack are left",
                function.name,
                frame.bytes,
                self.program.local_bytes - self.program.stack_start
            );
            return self.fault(FaultKind::OutOfBounds, warp, i, lane, message);
        }
        self.forget_local(warp, lane, base, frame.bytes);
        Ok(base)
    }

    fn forget_local(&self, warp: &mut Warp, lane: usize, from: u32, bytes: u32) {
        let start = lane * self.program.local_bytes as usize + from as usize;
        warp.local.written.unset(start, start + bytes as usize);
    }

    /// `alloca`, `stacksave`, `stackrestore`.
    pub(crate) fn stack(&mut self, warp: &mut Warp, i: &Instruction, op: StackOp, mask: u32) -> Outcome<()> {
        let program = self.program;
        match op {
            StackOp::Save => {
                let tops = warp.stack.map(u64::from);
                warp.set(i.d, mask, &tops);
            }
            StackOp::Restore => {
                for l in lanes(mask) {
                    let top = warp.get(i.a)[l];
                    if top < program.stack_start as u64 || top > warp.stack[l] as u64 {
                        let message = format!("the stack cannot go back to {top} from {}", warp.stack[l]);
                        return self.fault(FaultKind::InvalidOperand, warp, i, l, message);
                    }
                    warp.stack[l] = top as u32;
                }
            }
            StackOp::Allocate => {
                let mut places = [0; LANES];
                for l in lanes(mask) {
                    let (bytes, align) = (warp.get(i.a)[l], warp.get(i.b)[l].max(1));
                    let at = (warp.stack[l] as u64).next_multiple_of(align);
                    let end = at.saturating_add(bytes.max(1)).next_multiple_of(FRAME_ALIGN as u64);
                    if end > program.local_bytes as u64 {
                        let left = program.local_bytes - warp.stack[l];
                        let message =
                            format!("`alloca` of {bytes} bytes, where {left} of the stack are left");
                        return self.fault(FaultKind::OutOfBounds, warp, i, l, message);
                    }
                    self.forget_local(warp, l, at as u32, bytes as u32);
                    (places[l], warp.stack[l]) = (at, end as u32);
                }
                warp.set(i.d, mask, &places);
            }
        }
        Ok(())
    }

    /// Copies bytes of a lane's local memory with what is known of them.
    fn copy_local(&self, warp: &mut Warp, lane: usize, to: u32, from: u32, bytes: u32) {
        let base = lane * self.program.local_bytes as usize;
        let (to, from, bytes) = (base + to as usize, base + from as usize, bytes as usize);
        warp.local.data.copy_within(from..from + bytes, to);
        if warp.local.written.all(from, from + bytes) {
            warp.local.written.set(to, to + bytes);
            return;
        }
        for byte in 0..bytes {
            match warp.local.written.get(from + byte) {
                true => warp.local.written.set(to + byte, to + byte + 1),
                false => warp.local.written.unset(to + byte, to + byte + 1),
            }
        }
    }

    /// Up to eight bytes at a generic address.
    fn peek(
        &mut self,
        warp: &mut Warp,
        i: &Instruction,
        lane: usize,
        address: u64,
        size: usize,
    ) -> Outcome<u64> {
        let space = space_of(address);
        let address = within(space, address);
        let Some((region, offset)) = self.find(warp, 0, space, address, size as u64) else {
            return self.outside(warp, i, lane, "read", (space, address, size as u64));
        };
        let local = if region == Region::Local { lane * self.program.local_bytes as usize } else { 0 };
        let start = offset + local;
        let Some(contents) = self.contents(warp, region) else { return Ok(0) };
        let (value, is_written) = (contents.number(start, size), contents.written.all(start, start + size));
        if !is_written && self.checks.uninitialised {
            let message = format!("the host is told {size} bytes, some of which nothing has written");
            return self.fault(FaultKind::Uninitialised, warp, i, lane, message);
        }
        Ok(value)
    }

    /// The argument of a call, of some bytes.
    fn argument(&self, warp: &Warp, lane: usize, arguments: &[Slot], n: usize, size: usize) -> u64 {
        let Some(&slot) = arguments.get(n) else { return 0 };
        warp.local.number(lane * self.program.local_bytes as usize + warp.place(lane, slot) as usize, size)
    }

    /// The result of a function that no code has.
    fn give(&self, warp: &mut Warp, lane: usize, results: &[Slot], value: u64) {
        if let Some(&to) = results.first() {
            let place = lane * self.program.local_bytes as usize + warp.place(lane, to) as usize;
            warp.local.set_number(place, to.bytes.min(8) as usize, value);
        }
    }

    /// A text that ends with a zero.
    fn text(&mut self, warp: &mut Warp, i: &Instruction, lane: usize, address: u64) -> Outcome<String> {
        let mut bytes = Vec::new();
        while bytes.len() < TEXT_MAX {
            match self.peek(warp, i, lane, address.wrapping_add(bytes.len() as u64), 1)? as u8 {
                0 => break,
                byte => bytes.push(byte),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn asserted<T>(
        &mut self,
        warp: &mut Warp,
        i: &Instruction,
        lane: usize,
        arguments: &[Slot],
    ) -> Outcome<T> {
        let address = |n| self.argument(warp, lane, arguments, n, 8);
        let (message, file, function) = (address(0), address(1), address(3));
        let line = self.argument(warp, lane, arguments, 2, 4);
        let (message, file) = (self.text(warp, i, lane, message)?, self.text(warp, i, lane, file)?);
        let function = self.text(warp, i, lane, function)?;
        let message = format!("`{message}` in `{function}` at {file}:{line}");
        self.fault(FaultKind::Assert, warp, i, lane, message)
    }

    /// `printf`: the values lie one behind the other, each aligned to its size. The number of values, as the device's
    /// returns.
    fn print(&mut self, warp: &mut Warp, i: &Instruction, lane: usize, arguments: &[Slot]) -> Outcome<usize> {
        let format = self.argument(warp, lane, arguments, 0, 8);
        let mut values = self.argument(warp, lane, arguments, 1, 8);
        let format = self.text(warp, i, lane, format)?;
        let mut made = String::new();
        let mut count = 0;
        for piece in pieces(&format) {
            let (spec, conversion, wide) = match piece {
                Piece::Text(text) => {
                    made.push_str(text);
                    continue;
                }
                Piece::Value(spec, conversion, wide) => (spec, conversion, wide),
            };
            let size = if wide || matches!(conversion, 's' | 'p' | 'f' | 'F' | 'e' | 'E' | 'g' | 'G' | 'a') {
                8
            } else {
                4
            };
            values = values.wrapping_add(size - 1) & !(size - 1);
            let value = self.peek(warp, i, lane, values, size as usize)?;
            values = values.wrapping_add(size);
            count += 1;
            if conversion == 's' {
                let text = self.text(warp, i, lane, value)?;
                made.push_str(&padded(spec, text));
            } else {
                made.push_str(&shown(spec, conversion, value, size == 8));
            }
        }
        self.report.output.push_str(&made);
        Ok(count)
    }
}

impl Callee {
    fn frame_register(&self) -> Reg {
        self.frame.map_or(Reg::MAX, |frame| frame.register)
    }
}

impl Warp {
    /// Where a slot lies in a lane's local memory.
    fn place(&self, lane: usize, slot: Slot) -> u32 {
        self.get(slot.frame)[lane] as u32 + slot.offset
    }

    /// A lane enters a function: what its registers hold for an outer call is kept.
    fn enter(&mut self, lane: usize, frame: Option<Frame>, base: u32) {
        let Some(Frame { register, bytes, registers: (first, end), .. }) = frame else { return };
        let registers = &mut self.registers;
        self.kept[lane].push(self.stack[lane] as u64);
        self.kept[lane].extend(registers[first as usize..end as usize].iter().map(|values| values[lane]));
        registers[register as usize][lane] = base as u64;
        self.stack[lane] = base + bytes;
    }

    /// A lane leaves a function.
    fn leave(&mut self, lane: usize, frame: Option<Frame>) {
        let Some(Frame { registers: (first, end), .. }) = frame else { return };
        let kept = &mut self.kept[lane];
        let start = kept.len().saturating_sub((end - first) as usize);
        for (values, value) in
            self.registers[first as usize..end as usize].iter_mut().zip(kept.drain(start..))
        {
            values[lane] = value;
        }
        self.stack[lane] = kept.pop().map_or(self.stack[lane], |top| top as u32);
    }
}

enum Piece<'t> {
    Text(&'t str),
    /// Flags, width and precision; the conversion; whether it is of 64 bits.
    Value(&'t str, char, bool),
}

/// The texts and the values of a format.
fn pieces(format: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        pieces.push(Piece::Text(&rest[..at]));
        let after = &rest[at + 1..];
        if let Some(more) = after.strip_prefix('%') {
            pieces.push(Piece::Text("%"));
            rest = more;
            continue;
        }
        let Some(end) = after.find(|c: char| c.is_ascii_alphabetic() && !"hlLjzt".contains(c)) else { break };
        let spec = after[..end].trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let wide = after[spec.len()..end].contains(['l', 'j', 'z', 't']);
        let conversion = after[end..].chars().next().unwrap_or('d');
        pieces.push(Piece::Value(spec, conversion, wide));
        rest = &after[end + 1..];
    }
    pieces.push(Piece::Text(rest));
    pieces
}

fn padded(spec: &str, text: String) -> String {
    let (width, _) = spec.split_once('.').unwrap_or((spec, ""));
    let left = width.contains('-');
    let zero = width.trim_start_matches(['-', '+', ' ', '#']).starts_with('0') && !left;
    let width: usize = width.trim_start_matches(['-', '+', ' ', '#', '0']).parse().unwrap_or(0);
    match (left, zero) {
        (true, _) => format!("{text:<width$}"),
        (_, true) if text.starts_with('-') => format!("-{:0>1$}", &text[1..], width.saturating_sub(1)),
        (_, true) => format!("{text:0>width$}"),
        _ => format!("{text:>width$}"),
    }
}

fn shown(spec: &str, conversion: char, bits: u64, wide: bool) -> String {
    let signed = if wide { bits as i64 } else { bits as i32 as i64 };
    let precision = spec.split_once('.').and_then(|(_, p)| p.parse().ok());
    let value = f64::from_bits(bits);
    let text = match conversion {
        'd' | 'i' => signed.to_string(),
        'u' => bits.to_string(),
        'x' => format!("{bits:x}"),
        'X' => format!("{bits:X}"),
        'o' => format!("{bits:o}"),
        'c' => (bits as u8 as char).to_string(),
        'p' => format!("{bits:#x}"),
        'f' | 'F' => format!("{value:.0$}", precision.unwrap_or(6)),
        'e' | 'E' => exponent(value, precision.unwrap_or(6)),
        _ => shortest(value, precision.unwrap_or(6)),
    };
    let sign =
        if spec.contains('+') && !text.starts_with('-') && "difeg".contains(conversion) { "+" } else { "" };
    padded(spec, format!("{sign}{text}"))
}

/// As C writes `%e`: at least two digits of the exponent, with its sign.
fn exponent(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// As C writes `%g`: significant digits, without zeros at the end.
fn shortest(value: f64, precision: usize) -> String {
    let digits = precision.max(1);
    let text = exponent(value, digits - 1);
    let Some((mantissa, power)) = text.split_once('e') else { return text };
    let power: i32 = power.parse().unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if power < -4 || power >= digits as i32 {
        let power = format!("e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs());
        return trim(mantissa) + &power;
    }
    trim(&format!("{value:.0$}", (digits as i32 - 1 - power).max(0) as usize))
}
