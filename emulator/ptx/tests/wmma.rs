//! `wmma`: products of tiles loaded from memory, for each shape, type and order of elements.

mod common;
use common::{Random, bytes, kernel, read_bytes, run, shape};
use half::{bf16, f16};
use phalanx_ptx::{FaultKind, Memory};

/// The bytes of a small whole number in a type, and back.
fn put(kind: &str, x: f32) -> Vec<u8> {
    match kind {
        "f16" => f16::from_f32(x).to_le_bytes().to_vec(),
        "bf16" => bf16::from_f32(x).to_le_bytes().to_vec(),
        "s8" | "u8" => vec![x as i8 as u8],
        "s32" => (x as i32).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn get(kind: &str, bytes: &[u8]) -> f32 {
    match kind {
        "f16" => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        "s32" => i32::from_le_bytes(bytes.try_into().unwrap()) as f32,
        _ => f32::from_le_bytes(bytes.try_into().unwrap()),
    }
}

/// A matrix in memory by rows or by columns, with lines `pitch` elements long.
struct Matrix {
    values: Vec<f32>,
    columns: usize,
    pitch: usize,
    by_rows: bool,
}

impl Matrix {
    fn new(rows: usize, columns: usize, by_rows: bool, random: &mut Random) -> Matrix {
        let values = (0..rows * columns).map(|_| (random.next() % 7) as f32).collect();
        Matrix { values, columns, pitch: (if by_rows { columns } else { rows }) + 16, by_rows }
    }

    fn place(&self, row: usize, column: usize) -> usize {
        if self.by_rows { row * self.pitch + column } else { column * self.pitch + row }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.columns + column]
    }

    fn bytes(&self, kind: &str) -> Vec<u8> {
        let size = put(kind, 0.0).len();
        let mut bytes = vec![0; self.pitch * 48 * size];
        for (n, &x) in self.values.iter().enumerate() {
            let at = self.place(n / self.columns, n % self.columns) * size;
            bytes[at..at + size].copy_from_slice(&put(kind, x));
        }
        bytes
    }

    fn order(&self) -> &'static str {
        if self.by_rows { "row" } else { "col" }
    }
}

fn registers(from: usize, count: usize) -> String {
    format!("{{{}}}", (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(","))
}

/// D = A B + C, for operands of `kind` in so many registers, and sums of `sums`.
fn product([m, n, k]: [usize; 3], kind: &str, sums: &str, counts: [usize; 2], orders: [bool; 4]) {
    let mut random = Random(m as u64 * 7 + k as u64);
    let a = Matrix::new(m, k, orders[0], &mut random);
    let b = Matrix::new(k, n, orders[1], &mut random);
    let c = Matrix::new(m, n, orders[2], &mut random);
    let d = Matrix::new(m, n, orders[3], &mut random);
    let memory = Memory::new(1 << 20);
    let [pa, pb] = [&a, &b].map(|matrix| bytes(&memory, &matrix.bytes(kind)));
    let [pc, pd] = [&c, &d].map(|matrix| bytes(&memory, &matrix.bytes(sums)));
    let four = if sums == "f16" { 4 } else { 8 };
    let (ra, rb) = (registers(10, counts[0]), registers(20, counts[1]));
    let (rc, rd) = (registers(30, four), registers(40, four));
    let shape_ = format!("m{m}n{n}k{k}");
    let kinds = if kind == "f16" { format!("{sums}.{sums}") } else { format!("{sums}.{kind}.{kind}.{sums}") };
    let (oa, ob, oc, od) = (a.order(), b.order(), c.order(), d.order());
    let body = format!(
        "wmma.load.a.sync.aligned.{oa}.{shape_}.global.{kind} {ra}, [%p0], {};
        wmma.load.b.sync.aligned.{ob}.{shape_}.{kind} {rb}, [%p1], {};
        wmma.load.c.sync.aligned.{oc}.{shape_}.global.{sums} {rc}, [%p2], {};
        wmma.mma.sync.aligned.{oa}.{ob}.{shape_}.{kinds} {rd}, {ra}, {rb}, {rc};
        wmma.store.d.sync.aligned.{od}.{shape_}.global.{sums} [%p3], {rd}, {};",
        a.pitch, b.pitch, c.pitch, d.pitch
    );
    run(&kernel(4, &body), &memory, shape(1, 32), &[pa, pb, pc, pd])
        .unwrap_or_else(|f| panic!("{body}: {f}"));
    let size = put(sums, 0.0).len();
    let found = read_bytes(&memory, pd, d.bytes(sums).len());
    for row in 0..m {
        for column in 0..n {
            let wanted = c.at(row, column) + (0..k).map(|i| a.at(row, i) * b.at(i, column)).sum::<f32>();
            let at = d.place(row, column) * size;
            assert_eq!(get(sums, &found[at..at + size]), wanted, "{body} row {row} column {column}");
        }
    }
}

#[test]
fn tiles_are_multiplied_in_every_shape_and_order() {
    for bits in 0..16 {
        let orders = [bits & 1 == 0, bits & 2 == 0, bits & 4 == 0, bits & 8 == 0];
        product([16, 16, 16], "f16", "f32", [8, 8], orders);
    }
    let orders = [true, false, true, true];
    for shape in [[16, 16, 16], [8, 32, 16], [32, 8, 16]] {
        product(shape, "f16", "f16", [8, 8], orders);
        let [a, b] = [shape[0] * 16 / 64, shape[1] * 16 / 64];
        product(shape, "bf16", "f32", [a, b], orders);
        product(shape, "s8", "s32", [a / 2, b / 2], orders);
    }
    product([16, 16, 8], "tf32", "f32", [4, 4], orders);
}

#[test]
fn a_tile_past_the_end_is_found() {
    let memory = Memory::new(1 << 20);
    let a = bytes(&memory, &[0; 16 * 16 * 2 - 2]);
    let body = format!("wmma.load.a.sync.aligned.row.m16n16k16.f16 {}, [%p0];", registers(10, 8));
    let fault = run(&kernel(1, &body), &memory, shape(1, 32), &[a]).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [15, 0, 0]), "{fault}");
}

/// Numbers of so few bits that several lie in a byte, or of 64: `rows` lines of `columns`.
fn lines(kind: &str, rows: usize, columns: usize, random: &mut Random) -> (Vec<f64>, Vec<u8>) {
    let bits = match kind {
        "f64" => 64,
        kind => kind[1..].parse::<u32>().unwrap(),
    };
    let mut values = Vec::new();
    let mut data = vec![0u8; rows * columns * bits as usize / 8];
    for at in 0..rows * columns {
        let raw = random.next() & (u64::MAX >> (64 - bits));
        let value = match kind {
            "f64" => (raw % 1001) as f64 / 7.0 - 70.0,
            kind if kind.starts_with('s') => ((raw << (64 - bits)) as i64 >> (64 - bits)) as f64,
            _ => raw as f64,
        };
        values.push(value);
        match bits {
            64 => data[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes()),
            bits => data[at * bits as usize / 8] |= (raw << (at * bits as usize % 8)) as u8,
        }
    }
    (values, data)
}

/// The sums of `c` and the joined elements of A's rows and B's columns: of f64 in a chain over ascending k.
fn sums(pairing: &str, a: &[f64], b: &[f64], c: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let sum = |at: usize| {
        let pairs = (0..k).map(|i| (a[at / n * k + i], b[at % n * k + i]));
        pairs.fold(c[at], |sum, (x, y)| match pairing {
            "xor" => sum + (x != y) as u8 as f64,
            "and" => sum + x * y,
            _ => x.mul_add(y, sum),
        })
    };
    (0..m * n).map(sum).collect()
}

/// The bytes of sums as f64 or as whole numbers that wrap, or stay at the ends of s32.
fn stored(sums: &[f64], double: bool, saturate: bool) -> Vec<u8> {
    let whole = |x: f64| if saturate { x as i32 } else { x as i64 as i32 };
    match double {
        true => sums.iter().flat_map(|x| x.to_le_bytes()).collect(),
        false => sums.iter().flat_map(|x| whole(*x).to_le_bytes()).collect(),
    }
}

#[test]
fn tiles_of_doubles_and_of_few_bits_are_multiplied() {
    let cases = [("f64", 4, ""), ("s4", 32, ""), ("u4", 32, ""), ("b1", 128, "xor"), ("b1", 128, "and")];
    for (kind, k, pairing) in cases {
        let mut random = Random(k as u64);
        let memory = Memory::new(1 << 20);
        let double = kind == "f64";
        let ((a, pa), (b, pb)) = (lines(kind, 8, k, &mut random), lines(kind, 8, k, &mut random));
        let c: Vec<f64> = (0..64).map(|i| i as f64 - 9.0).collect();
        let [pa, pb] = [pa, pb].map(|data| bytes(&memory, &data));
        let pc = bytes(&memory, &stored(&c, double, false));
        let (acc, regs) = if double {
            ("f64", ["%g1", "%g2", "{%g3, %g4}"])
        } else {
            ("s32", ["%r1", "%r2", "{%r3, %r4}"])
        };
        let (op, rounding) = match pairing {
            "" if double => (String::new(), ".rn"),
            "" => (String::new(), ""),
            pairing => (format!(".{pairing}.popc"), ""),
        };
        let body = format!(
            "wmma.load.a.sync.aligned.row.m8n8k{k}.global.{kind} {{{ra}}}, [%p0], {k}; wmma.load.b.sync.aligned.col.m8n8k{k}.global.{kind} {{{rb}}}, [%p1], {k}; wmma.load.c.sync.aligned.row.m8n8k{k}.global.{acc} {rc}, [%p2], 8;
            wmma.mma{op}.sync.aligned.row.col.m8n8k{k}{rounding}.{acc}.{kind}.{kind}.{acc} {rc}, {{{ra}}}, {{{rb}}}, {rc}; wmma.store.d.sync.aligned.row.m8n8k{k}.global.{acc} [%p2], {rc}, 8;",
            ra = regs[0], rb = regs[1], rc = regs[2]
        );
        run(&kernel(3, &body), &memory, shape(1, 32), &[pa, pb, pc])
            .unwrap_or_else(|f| panic!("{body}: {f}"));
        let wanted = stored(&sums(pairing, &a, &b, &c, [8, 8, k]), double, false);
        assert_eq!(read_bytes(&memory, pc, wanted.len()), wanted, "{body}");
    }
}

/// `mma.sync` of a shape: fragments as the PTX ISA lays them out.
fn fragments(m: usize, k: usize, kind: &str, form: &str, saturate: bool) {
    let mut random = Random((m * k) as u64);
    let memory = Memory::new(1 << 20);
    let bits = if kind == "f64" { 64 } else { kind[1..].parse::<usize>().unwrap() };
    let double = kind == "f64";
    let ((a, pa), (b, pb)) = (lines(kind, m, k, &mut random), lines(kind, 8, k, &mut random));
    let big = if saturate { i32::MAX as f64 - 1000.0 } else { 5.0 };
    let c: Vec<f64> = (0..m * 8).map(|i| i as f64 + big).collect();
    // A register holds neighbours of a row (of B: of a column); a lane's group of four has the next ones.
    let width = bits.max(32);
    let each = width / bits;
    let (count_a, count_b, count_c) = (m * k * bits / 32 / width, 8 * k * bits / 32 / width, m / 4);
    let place = |lines: usize, register: usize, lane: usize| {
        let line = lane / 4 + register % (lines / 8) * 8;
        (line * k + register / (lines / 8) * 4 * each + lane % 4 * each) * bits / 8
    };
    let operand = |data: &[u8], lines: usize, count: usize| -> Vec<u8> {
        let places = (0..32).flat_map(|lane| (0..count).map(move |r| (lane, r)));
        places.flat_map(|(lane, r)| data[place(lines, r, lane)..][..width / 8].to_vec()).collect()
    };
    let sums_at = |lane: usize, r: usize| (lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2;
    let order: Vec<usize> = (0..32).flat_map(|lane| (0..count_c).map(move |r| sums_at(lane, r))).collect();
    let in_order = |sums: &[f64]| order.iter().map(|&at| sums[at]).collect::<Vec<_>>();
    let [pa, pb] = [operand(&pa, m, count_a), operand(&pb, 8, count_b)].map(|data| bytes(&memory, &data));
    let pc = bytes(&memory, &stored(&in_order(&c), double, false));
    let (reg, acc, size) = if double { ("%g", "f64", 8) } else { ("%r", "s32", 4) };
    let names = |from: usize, n: usize| (from..from + n).map(|i| format!("{reg}{i}")).collect::<Vec<_>>();
    // f64 registers are few, so they are declared here.
    let (ra, rb, rc) = (names(20, count_a), names(40, count_b), names(60, count_c));
    let moves = |op: &str, names: &[String], base: &str| -> String {
        let each = |(i, name): (usize, &String)| match op {
            "ld" => format!("ld.global.b{} {name}, [{base}+{}];", size * 8, i * size),
            _ => format!("st.global.b{} [{base}+{}], {name};", size * 8, i * size),
        };
        let offset = names.len() * size;
        format!("mul.wide.u32 %d0, %t, {offset}; add.u64 %d1, {base}, %d0;")
            + &names.iter().enumerate().map(each).collect::<String>().replace(&format!("[{base}+"), "[%d1+")
    };
    let list = |names: &[String]| format!("{{{}}}", names.join(", "));
    let body = format!(
        "{{ .reg .f64 %g<80>; {} {} {} mma.sync.aligned.m{m}n8k{k}.row.col{form} {rc_}, {}, {}, {rc_}; {} }}",
        moves("ld", &ra, "%p0"),
        moves("ld", &rb, "%p1"),
        moves("ld", &rc, "%p2"),
        list(&ra),
        list(&rb),
        moves("st", &rc, "%p2"),
        rc_ = list(&rc)
    );
    run(&kernel(3, &body), &memory, shape(1, 32), &[pa, pb, pc]).unwrap_or_else(|f| panic!("{body}: {f}"));
    let pairing = ["xor", "and"].into_iter().find(|p| form.contains(p)).unwrap_or("");
    let wanted = stored(&in_order(&sums(pairing, &a, &b, &c, [m, 8, k])), double, saturate);
    assert_eq!(read_bytes(&memory, pc, wanted.len()), wanted, "{acc} {body}");
}

#[test]
fn products_of_doubles_and_of_few_bits_follow_the_fragment_layouts() {
    for (m, k) in [(8, 4), (16, 4), (16, 8), (16, 16)] {
        fragments(m, k, "f64", ".f64.f64.f64.f64", false);
    }
    for (name, bits) in [("8", 8), ("4", 4)] {
        for (m, k) in [(8, 128 / bits), (16, 128 / bits), (16, 256 / bits)] {
            for sign in ["s", "u"] {
                let kind = format!("{sign}{name}");
                fragments(m, k, &kind, &format!(".s32.{kind}.{kind}.s32"), false);
                fragments(m, k, &kind, &format!(".satfinite.s32.{kind}.{kind}.s32"), true);
            }
        }
    }
    for (m, k) in [(8, 128), (16, 128), (16, 256)] {
        fragments(m, k, "b1", ".s32.b1.b1.s32.xor.popc", false);
        fragments(m, k, "b1", ".s32.b1.b1.s32.and.popc", false);
    }
}
