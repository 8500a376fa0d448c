//! What all tests need: kernels around a few instructions, and values to run them on.
#![allow(dead_code)]

use std::sync::Arc;

use phalanx_ptx::{Checks, Fault, Launch, Loaded, Memory, Module, Report, launch};

/// A module around functions and directives.
pub fn module(text: &str) -> Loaded {
    let memory = Memory::new(1 << 30);
    load(text, &memory)
}

/// A module around functions and directives, in a memory.
pub fn load(text: &str, memory: &Memory) -> Loaded {
    let text = format!(".version 9.0\n.target sm_90a\n.address_size 64\n{text}");
    Loaded::new(Arc::new(Module::parse(&text).unwrap()), memory).unwrap()
}

/// So many blocks of so many threads.
pub fn shape(blocks: u32, threads: u32) -> Launch {
    Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, cluster: [1, 1, 1] }
}

/// Runs the kernel `k` with 64-bit parameters.
pub fn run(text: &str, memory: &Memory, shape: Launch, parameters: &[u64]) -> Result<Report, Fault> {
    let bytes: Vec<u8> = parameters.iter().flat_map(|p| p.to_le_bytes()).collect();
    launch(&load(text, memory), "k", &[memory], &shape, &bytes, &Checks::default())
}

/// A kernel `k` with parameters `p0`, `p1`, ... and registers of all kinds; `%tid` is in `%t`, `%ctaid` in `%c`.
pub fn kernel(parameters: usize, body: &str) -> String {
    let list: Vec<String> = (0..parameters).map(|i| format!(".param .u64 p{i}")).collect();
    let loads: String = (0..parameters).map(|i| format!("ld.param.u64 %p{i}, [p{i}];\n")).collect();
    format!(
        ".visible .entry k({})\n{{\n.reg .pred %q<16>; .reg .b16 %h<32>; .reg .b32 %r<160>; .reg .b64 %d<32>; .reg .f32 %f<160>; .reg .f64 %g<16>;\n.reg .b64 %p<8>; .reg .b32 %t; .reg .b32 %c;\n{loads}mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;\n{body}\nret;\n}}\n",
        list.join(", ")
    )
}

/// An allocation with 32-bit words.
pub fn words(memory: &Memory, values: &[u32]) -> u64 {
    bytes(memory, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// An allocation with bytes.
pub fn bytes(memory: &Memory, values: &[u8]) -> u64 {
    let address = memory.allocate(values.len() as u64).unwrap();
    memory.write(address, values).unwrap();
    address
}

/// The 32-bit words at an address.
pub fn read_words(memory: &Memory, address: u64, n: usize) -> Vec<u32> {
    let mut bytes = vec![0; n * 4];
    memory.read(address, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The bytes at an address.
pub fn read_bytes(memory: &Memory, address: u64, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    memory.read(address, &mut bytes).unwrap();
    bytes
}

/// A few lines of pseudo-random numbers: the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51afd7ed558ccd) ^ (x >> 29)
    }
}

/// Values of a type where instructions go wrong, and some random ones.
pub fn edges(kind: &str) -> Vec<u64> {
    let mut random = Random(kind.len() as u64 * 77 + kind.as_bytes()[0] as u64);
    let mut values: Vec<u64> = match kind {
        "pred" => return vec![0, 1],
        "f32" => [
            0.0f32,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            2.5,
            -2.5,
            3.0,
            1e-3,
            16777216.0,
            16777217.0,
            2147483648.0,
            -2147483648.0,
            4294967296.0,
            9.3e18,
            1e30,
            -1e30,
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-40,
            -1e-45,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            65504.0,
            65520.0,
            6e-8,
            5.96e-8,
            127.5,
            255.5,
            32767.5,
            0.1,
            -0.3,
            100.25,
        ]
        .iter()
        .map(|x| x.to_bits() as u64)
        .collect(),
        "f64" => [
            0.0f64,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            2.5,
            -2.5,
            1e-3,
            4503599627370497.5,
            9007199254740993.0,
            2147483648.5,
            -9.3e18,
            1.9e19,
            1e30,
            f64::MAX,
            f64::MIN_POSITIVE,
            5e-324,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
            1e-40,
            3.5e38,
            0.1,
            -0.3,
        ]
        .iter()
        .map(|x| x.to_bits())
        .collect(),
        "f16" => vec![
            0, 0x8000, 0x3c00, 0xbc00, 0x3e00, 0x4100, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff,
            0x7c00, 0xfc00, 0x7e00, 0x2e66, 0x5640, 0x3555, 0x6400, 0x1400,
        ],
        "bf16" => vec![
            0, 0x8000, 0x3f80, 0xbf80, 0x3fc0, 0x4020, 0x0001, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f,
            0x7f80, 0xff80, 0x7fc0, 0x3dcd, 0x42c8, 0x3eaa, 0x4780, 0x2480,
        ],
        _ => {
            let bits = size(kind) * 8;
            let top = 1u64 << (bits - 1);
            vec![
                0,
                1,
                2,
                3,
                5,
                7,
                15,
                16,
                31,
                32,
                33,
                63,
                64,
                100,
                255,
                top,
                top - 1,
                top + 1,
                u64::MAX,
                u64::MAX - 1,
                u64::MAX - 6,
                0x5555_5555_5555_5555,
            ]
        }
    };
    for _ in 0..12 {
        values.push(random.next() >> (random.next() % 40));
        values.push(random.next());
    }
    let width = u64::MAX >> (64 - size(kind) * 8);
    values.iter_mut().for_each(|v| *v &= width);
    values
}

/// The bytes of a type.
pub fn size(kind: &str) -> u32 {
    match kind {
        "pred" => 1,
        _ if kind.ends_with("x2") => 2 * size(&kind[..kind.len() - 2]),
        _ => kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<u32>().unwrap() / 8,
    }
}

/// Every combination of the edges of several types, if there are many only some.
pub fn combinations(kinds: &[&str]) -> Vec<Vec<u64>> {
    let tables: Vec<Vec<u64>> = kinds.iter().map(|kind| edges(kind)).collect();
    let total: usize = tables.iter().map(Vec::len).product();
    let wanted = total.min(6000);
    let mut random = Random(3);
    let pick = |mut n: usize| {
        let mut row = Vec::new();
        for table in &tables {
            row.push(table[n % table.len()]);
            n /= table.len();
        }
        row
    };
    (0..wanted)
        .map(|n| pick(if total <= 6000 { n } else { (random.next() % total as u64) as usize }))
        .collect()
}

/// Runs `body`, which computes `%out` (of `out`) from `%a`, `%b`, `%c`, `%e` of the given types, on every row.
pub fn compute(body: &str, kinds: &[&str], out: &str, rows: &[Vec<u64>]) -> Vec<u64> {
    let names = ["%a", "%b", "%c", "%e"];
    let bits = |kind: &str| (size(kind) * 8).max(16);
    let mut text = String::new();
    for (name, kind) in names.iter().zip(kinds) {
        text += &format!(".reg .b{} {name};\n", bits(kind));
    }
    text += &format!(".reg .b{} %out;\n", bits(out));
    text += "mad.lo.u32 %t, %c_, 128, %t; mul.wide.u32 %d0, %t, 64; add.u64 %d1, %p0, %d0;\n"
        .replace("%c_", "%r0")
        .as_str();
    for (i, (name, kind)) in names.iter().zip(kinds).enumerate() {
        text += &format!("ld.global.b{} {name}, [%d1+{}];\n", bits(kind), i * 8);
    }
    text += &format!("{{\n{body}\n}}\nst.global.b{} [%d1+32], %out;\n", bits(out));
    let text = kernel(1, &format!("mov.u32 %r0, %ctaid.x;\n{text}"));
    let memory = Memory::new(1 << 30);
    let threads = rows.len().next_multiple_of(128);
    let mut data = vec![0u8; threads * 64];
    for (row, place) in rows.iter().zip(data.chunks_exact_mut(64)) {
        for (value, place) in row.iter().zip(place.chunks_exact_mut(8)) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    }
    let address = bytes(&memory, &data);
    run(&text, &memory, shape((threads / 128) as u32, 128), &[address])
        .unwrap_or_else(|fault| panic!("{body}: {fault}"));
    let result = read_bytes(&memory, address, data.len());
    let width = u64::MAX >> (64 - bits(out));
    rows.iter()
        .enumerate()
        .map(|(i, _)| u64::from_le_bytes(result[i * 64 + 32..i * 64 + 40].try_into().unwrap()) & width)
        .collect()
}

/// Holds an instruction `name %out, %a, %b, ...` against a reference for every combination of edge values.
pub fn check(name: &str, kinds: &[&str], out: &str, reference: impl Fn(&[u64]) -> u64) {
    let sources = ["%a", "%b", "%c", "%e"][..kinds.len()].join(", ");
    check_body(&format!("{name} %out, {sources};"), kinds, out, reference);
}

/// Holds statements that compute `%out` against a reference.
pub fn check_body(body: &str, kinds: &[&str], out: &str, reference: impl Fn(&[u64]) -> u64) {
    let rows = combinations(kinds);
    let found = compute(body, kinds, out, &rows);
    for (row, found) in rows.iter().zip(found) {
        let wanted = reference(row);
        assert_eq!(found, wanted, "{body} of {row:x?}: {found:#x} where {wanted:#x} is right");
    }
}

/// Like [`check`], with NaNs of any payload alike.
pub fn check_float(name: &str, kinds: &[&str], out: &str, reference: impl Fn(&[u64]) -> u64) {
    let sources = ["%a", "%b", "%c", "%e"][..kinds.len()].join(", ");
    let body = format!("{name} %out, {sources};");
    let rows = combinations(kinds);
    let found = compute(&body, kinds, out, &rows);
    let nan = |bits: u64| match out {
        "f32" => f32::from_bits(bits as u32).is_nan(),
        "f64" => f64::from_bits(bits).is_nan(),
        "bf16" => bits & 0x7fff > 0x7f80,
        _ => bits & 0x7fff > 0x7c00,
    };
    for (row, found) in rows.iter().zip(found) {
        let wanted = reference(row);
        if nan(found) && nan(wanted) {
            continue;
        }
        assert_eq!(found, wanted, "{body} of {row:x?}: {found:#x} where {wanted:#x} is right");
    }
}

/// The sign-extended value of the low bits.
pub fn signed(bits: u64, kind: &str) -> i128 {
    let up = 64 - size(kind) * 8;
    ((bits << up) as i64 >> up) as i128
}

/// The value of an integer of a type, by its sign.
pub fn value(bits: u64, kind: &str) -> i128 {
    if kind.starts_with('s') { signed(bits, kind) } else { bits as i128 }
}

/// The low bits of a type.
pub fn low(value: i128, kind: &str) -> u64 {
    value as u64 & (u64::MAX >> (64 - size(kind) * 8))
}
