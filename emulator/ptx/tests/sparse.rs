//! Products with a sparse A (`mma.sp`), held against dense ones: fragments and metadata as the PTX ISA lays them out.

mod common;

use common::{Random, kernel, read_words, run, shape, words};
use half::{bf16, f16};
use phalanx_ptx::{Fault, FaultKind, Memory};

/// A kind of product: the types of A and B, and the depth of the dense product.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    F16,
    Bf16,
    Tf32,
    S8,
    S4,
}

impl Kind {
    fn bits(self) -> usize {
        match self {
            Kind::F16 | Kind::Bf16 => 16,
            Kind::Tf32 => 32,
            Kind::S8 => 8,
            Kind::S4 => 4,
        }
    }

    fn encoded(self, x: i32) -> u32 {
        match self {
            Kind::F16 => f16::from_f32(x as f32).to_bits() as u32,
            Kind::Bf16 => bf16::from_f32(x as f32).to_bits() as u32,
            Kind::Tf32 => (x as f32).to_bits(),
            Kind::S8 => x as u8 as u32,
            Kind::S4 => x as u32 & 15,
        }
    }
}

/// The registers of a lane for the rows (A) or the columns (B) of a matrix with `k` numbers in each: register after register, each
/// with neighbours of one line, first `lines` / 8 lines of distance 8, then further along.
fn fragment(kind: Kind, lane: usize, lines: usize, k: usize, at: impl Fn(usize, usize) -> i32) -> Vec<u32> {
    let each = 32 / kind.bits();
    let mut registers = Vec::new();
    for along in (0..k).step_by(4 * each) {
        for line in (lane / 4..lines).step_by(8) {
            let number = |e: usize| kind.encoded(at(line, along + lane % 4 * each + e));
            registers.push((0..each).fold(0, |register, e| register | number(e) << (e * kind.bits())));
        }
    }
    registers
}

/// A sparse matrix of 16 rows: what is there, the column of each, and 16-bit pieces of metadata of each row.
struct Sparse {
    there: Vec<i32>,
    columns: Vec<usize>,
    metadata: Vec<Vec<u32>>,
}

/// Draws a sparse matrix.
fn drawn(kind: Kind, k: usize, random: &mut Random) -> Sparse {
    let (mut there, mut columns, mut metadata) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..16 {
        let mut bits = Vec::new();
        let two = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];
        match kind {
            Kind::Tf32 => {
                for pair in 0..k / 2 {
                    let odd = random.next() as usize % 2;
                    columns.push(2 * pair + odd);
                    bits.extend([[0, 0, 1, 0], [0, 1, 1, 1]][odd]);
                }
            }
            _ => {
                let wide = if kind == Kind::S4 { 2 } else { 1 };
                for group in 0..k / 4 / wide {
                    for place in two[random.next() as usize % 6] {
                        columns.extend((0..wide).map(|e| (4 * group + place) * wide + e));
                        bits.extend([place as u32 & 1, place as u32 >> 1]);
                    }
                }
            }
        }
        let piece = |bits: &[u32]| bits.iter().rev().fold(0, |piece, bit| piece << 1 | bit);
        metadata.push(bits.chunks(16).map(piece).collect());
    }
    there.extend(columns.iter().map(|_| (random.next() % 15) as i32 - 7));
    Sparse { there, columns, metadata }
}

/// Runs `mma.sp` with the metadata in the lanes that the selector names; the others hold what would be wrong. `change` changes the
/// metadata of lane 0's quad. The results, row by row, and those of the dense product.
fn product(
    name: &str,
    kind: Kind,
    k: usize,
    selector: usize,
    change: impl Fn(u32) -> u32,
) -> (Result<Vec<f32>, Fault>, Vec<f32>) {
    let mut random = Random(k as u64 * 8 + selector as u64);
    let a = drawn(kind, k, &mut random);
    let b: Vec<i32> = (0..8 * k).map(|_| (random.next() % 15) as i32 - 7).collect();
    let c: Vec<i32> = (0..128).map(|_| (random.next() % 15) as i32 - 7).collect();
    let (narrow, whole) = (name.contains("f16.f16.f16.f16"), name.contains("s32"));
    let mut registers = Vec::new();
    for lane in 0..32 {
        registers.extend(fragment(kind, lane, 16, k / 2, |row, at| a.there[row * k / 2 + at]));
        registers.extend(fragment(kind, lane, 8, k, |column, at| b[column * k + at]));
        let place = |i: usize| c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
        match (narrow, whole) {
            (true, _) => registers.extend(fragment(Kind::F16, lane, 16, 8, |row, at| c[row * 8 + at])),
            (_, true) => registers.extend((0..4).map(|i| place(i) as u32)),
            _ => registers.extend((0..4).map(|i| (place(i) as f32).to_bits())),
        }
        let pieces = a.metadata[0].len();
        let piece = (lane % 4).checked_sub(selector * pieces).filter(|piece| *piece < pieces);
        registers.push(piece.map_or(0x4e4e_4e4e, |piece| {
            let both = a.metadata[lane / 4][piece] | a.metadata[lane / 4 + 8][piece] << 16;
            if lane < 4 { change(both) } else { both }
        }));
    }
    let n = registers.len() / 32;
    let each = 32 / kind.bits();
    let counts = [16 * k / 2 / 32 / each, 8 * k / 32 / each, if narrow { 2 } else { 4 }];
    assert_eq!(counts.iter().sum::<usize>() + 1, n);
    let loads: String = (0..n).map(|i| format!("ld.global.u32 %r{}, [%d1+{}];", 20 + i, i * 4)).collect();
    let list = |from: usize, n: usize| {
        let names: Vec<String> = (from..from + n).map(|i| format!("%r{i}")).collect();
        format!("{{{}}}", names.join(","))
    };
    let [la, lb, lc] = [0, 1, 2].map(|i| list(20 + counts[..i].iter().sum::<usize>(), counts[i]));
    let stores: String =
        (0..counts[2]).map(|i| format!("st.global.u32 [%d2+{}], %r{};", i * 4, 60 + i)).collect();
    let body = format!(
        "mul.wide.u32 %d0, %t, {}; add.u64 %d1, %p0, %d0; {loads} {name} {}, {la}, {lb}, {lc}, %r{}, {selector}; mul.wide.u32 %d0, %t, 16; add.u64 %d2, %p1, %d0; {stores}",
        n * 4,
        list(60, counts[2]),
        20 + n - 1
    );
    let memory = Memory::new(1 << 20);
    let (source, out) = (words(&memory, &registers), words(&memory, &[0; 128]));
    let ran = run(&kernel(2, &body), &memory, shape(1, 32), &[source, out]);
    let found = read_words(&memory, out, 128);
    let results = (0..128).map(|n| {
        let (row, column) = (n / 8, n % 8);
        let (lane, i) = (row % 8 * 4 + column / 2, row / 8 * 2 + column % 2);
        match (narrow, whole) {
            (true, _) => f16::from_bits((found[lane * 4 + i / 2] >> (16 * (i % 2))) as u16).to_f32(),
            (_, true) => found[lane * 4 + i] as i32 as f32,
            _ => f32::from_bits(found[lane * 4 + i]),
        }
    });
    let dense = (0..128).map(|n| {
        let (row, column) = (n / 8, n % 8);
        let pairs = (row * k / 2..(row + 1) * k / 2).map(|at| a.there[at] * b[column * k + a.columns[at]]);
        (c[n] + pairs.sum::<i32>()) as f32
    });
    (ran.map(|_| results.collect()), dense.collect())
}

#[test]
fn sparse_products_are_those_of_the_dense_matrix() {
    let all = [
        ("m16n8k16.row.col.f32.f16.f16.f32", Kind::F16, 16, 4),
        ("m16n8k32.row.col.f32.f16.f16.f32", Kind::F16, 32, 2),
        ("m16n8k32.row.col.f16.f16.f16.f16", Kind::F16, 32, 2),
        ("m16n8k16.row.col.f32.bf16.bf16.f32", Kind::Bf16, 16, 4),
        ("m16n8k32.row.col.f32.bf16.bf16.f32", Kind::Bf16, 32, 2),
        ("m16n8k8.row.col.f32.tf32.tf32.f32", Kind::Tf32, 8, 4),
        ("m16n8k16.row.col.f32.tf32.tf32.f32", Kind::Tf32, 16, 2),
        ("m16n8k32.row.col.s32.s8.s8.s32", Kind::S8, 32, 2),
        ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", Kind::S8, 32, 2),
        ("m16n8k64.row.col.s32.s4.s4.s32", Kind::S4, 64, 2),
    ];
    for (shape, kind, k, selectors) in all {
        for selector in 0..selectors {
            for sparse in ["sp", "sp::ordered_metadata"] {
                let name = format!("mma.{sparse}.sync.aligned.{shape}");
                let (found, dense) = product(&name, kind, k, selector, |metadata| metadata);
                assert_eq!(
                    found.unwrap_or_else(|fault| panic!("{name}: {fault}")),
                    dense,
                    "{name} {selector}"
                );
            }
        }
    }
}

#[test]
fn metadata_that_name_no_two_columns_are_a_fault() {
    let name = |sparse: &str| format!("mma.{sparse}.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32");
    let row = |metadata: u32, places: u32| metadata & !(15 << 16) | places << 16;
    let outcome = |sparse: &str, places: u32| product(&name(sparse), Kind::F16, 16, 0, |m| row(m, places)).0;
    for (sparse, places, text) in [
        ("sp", 0b1010, "metadata of row 8 of a sparse matrix: places 2 and 2, where they must differ"),
        (
            "sp::ordered_metadata",
            0b0110,
            "metadata of row 8 of a sparse matrix: places 2 and 1, where they must ascend",
        ),
    ] {
        let fault = outcome(sparse, places).unwrap_err();
        assert_eq!((fault.kind, fault.message.as_str()), (FaultKind::InvalidOperand, text));
    }
    outcome("sp", 0b0110).unwrap();
    let name = "mma.sp.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32";
    let fault = product(name, Kind::Tf32, 8, 1, |m| m & !15 | 1).0.unwrap_err();
    assert!(fault.message.contains("0b0001, where 0b0100 or 0b1110 names one of two elements"), "{fault}");
}

#[test]
fn shapes_that_are_not_there_are_refused_where_they_are_reached() {
    // Those whose metadata are in all four lanes, and a selector beyond them.
    for (operands, text) in [
        (
            "m16n8k64.row.col.s32.s8.s8.s32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, %r5, 0",
            "this shape of `mma.sp`",
        ),
        (
            "m16n8k32.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, %r5, 2",
            "names no lanes",
        ),
    ] {
        let body = format!("mma.sp.sync.aligned.{operands};");
        let fault = run(&kernel(0, &body), &Memory::new(1 << 20), shape(1, 32), &[]).unwrap_err();
        assert!(fault.kind == FaultKind::Unsupported && fault.message.contains(text), "{fault}");
    }
}
