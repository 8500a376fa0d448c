//! Matrices of a warp and a warpgroup, from the fragment layouts and the descriptors of the PTX ISA.

mod common;
use common::{Random, bytes, kernel, read_bytes, read_words, run, shape, words};
use half::{bf16, f16};
use phalanx_ptx::{FaultKind, Memory};

/// 16-bit numbers as bytes.
fn halves(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Copies `n` bytes from `%p0` to shared memory at `s`, 16 bytes a thread and turn.
fn fill(n: usize, threads: usize) -> String {
    (0..n.div_ceil(16 * threads))
        .map(|i| {
            format!(
                "mad.lo.u32 %r1, %t, 16, {}; setp.lt.u32 %q0, %r1, {n}; cvt.u64.u32 %d0, %r1; add.u64 %d0, %p0, %d0; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; @%q0 ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d0]; @%q0 st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};\n",
                i * 16 * threads
            )
        })
        .collect::<String>()
        + "fence.proxy.async.shared::cta; bar.sync 0;\n"
}

#[test]
fn rows_are_loaded_as_fragments_and_stored_back() {
    let tiles: Vec<u16> = (0..256).map(|i| i * 3 + 1).collect();
    for count in [1usize, 2, 4] {
        for trans in ["", ".trans"] {
            let memory = Memory::new(1 << 20);
            let (source, out, back) =
                (bytes(&memory, &halves(&tiles)), words(&memory, &[0; 128]), memory.allocate(512).unwrap());
            let list = (10..10 + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(",");
            let stores: String =
                (0..count).map(|i| format!("st.global.u32 [%d1+{}], %r{};", i * 4, 10 + i)).collect();
            let body = format!(
                ".shared .align 16 .b8 s[1024]; {} mov.u32 %r2, s; mad.lo.u32 %r3, %t, 16, %r2; ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{list}}}, [%r3];
                mul.wide.u32 %d0, %t, 16; add.u64 %d1, %p1, %d0; {stores}
                stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r3+512], {{{list}}}; bar.warp.sync -1; setp.lt.u32 %q0, %t, {}; @%q0 ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3+512]; add.u64 %d2, %p2, %d0; @%q0 st.global.v4.u32 [%d2], {{%r4, %r5, %r6, %r7}};",
                fill(512, 32),
                count * 8
            );
            run(&kernel(3, &body), &memory, shape(1, 32), &[source, out, back]).unwrap();
            let found = read_words(&memory, out, 128);
            for lane in 0..32 {
                for m in 0..count {
                    // Thread l holds row l / 4, columns 2 (l % 4) and the next; transposed, the column.
                    let (row, col) = (lane / 4, lane % 4 * 2);
                    let element = |r: usize, c: usize| {
                        tiles[m * 64 + if trans.is_empty() { r * 8 + c } else { c * 8 + r }] as u32
                    };
                    assert_eq!(
                        found[lane * 4 + m],
                        element(row, col) | element(row, col + 1) << 16,
                        "x{count}{trans} lane {lane} matrix {m}"
                    );
                }
            }
            assert_eq!(
                read_bytes(&memory, back, count * 128),
                halves(&tiles[..count * 64]),
                "x{count}{trans} back"
            );
        }
    }
}

#[test]
fn a_fragment_is_transposed() {
    let memory = Memory::new(1 << 20);
    let out = words(&memory, &[0; 32]);
    // Element (r, c) is 8 r + c.
    let body = "shl.b32 %r1, %t, 1; add.u32 %r2, %r1, 1; shl.b32 %r2, %r2, 16; or.b32 %r1, %r1, %r2; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r1; mul.wide.u32 %d0, %t, 4; add.u64 %d0, %p0, %d0; st.global.u32 [%d0], %r3;";
    run(&kernel(1, body), &memory, shape(1, 32), &[out]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|l| (l / 4 + l % 4 * 16) | (l / 4 + l % 4 * 16 + 8) << 16).collect();
    assert_eq!(read_words(&memory, out, 32), wanted);
}

#[derive(Clone, Copy, PartialEq)]
enum Element {
    F16,
    Bf16,
    Tf32,
    S8,
}

impl Element {
    fn bits(self, x: f32) -> u32 {
        match self {
            Element::F16 => f16::from_f32(x).to_bits() as u32,
            Element::Bf16 => bf16::from_f32(x).to_bits() as u32,
            Element::Tf32 => x.to_bits(),
            Element::S8 => x as i8 as u8 as u32,
        }
    }
    fn size(self) -> usize {
        match self {
            Element::Tf32 => 32,
            Element::S8 => 8,
            _ => 16,
        }
    }
}

/// Small numbers whose sums of products are exact in f32, most of them not symmetric in any way.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..n).map(|_| (random.next() % 17) as f32 - 8.0).collect()
}

/// `mma.sync` of one shape with A, B and C filled by the ISA's tables: A's element (row, col) and so on at index i of
/// a register list.
fn mma(name: &str, kind: Element, k: usize, narrow: bool) {
    let (a, b, c) = (numbers(16 * k, 1), numbers(k * 8, 2), numbers(128, 3));
    let each = 32 / kind.size();
    let (a_regs, b_regs) = (16 * k / 32 / each, 8 * k / 32 / each);
    let mut registers = vec![];
    for lane in 0..32usize {
        let (group, place) = (lane >> 2, lane % 4);
        // As the ISA writes it: element i of a fragment, with its row and its column.
        let a_at = |i: usize| match (kind, k) {
            (Element::F16 | Element::Bf16, 16) => (
                if i < 2 || (4..6).contains(&i) { group } else { group + 8 },
                place * 2 + (i & 1) + if i < 4 { 0 } else { 8 },
            ),
            (Element::F16 | Element::Bf16, _) => (if i < 2 { group } else { group + 8 }, place * 2 + (i & 1)),
            (Element::Tf32, 4) => (if i == 0 { group } else { group + 8 }, place),
            (Element::Tf32, _) => {
                (if i == 0 || i == 2 { group } else { group + 8 }, if i < 2 { place } else { place + 4 })
            }
            (Element::S8, _) => (
                if i < 4 || (8..12).contains(&i) { group } else { group + 8 },
                place * 4 + (i & 3) + if i < 8 { 0 } else { 16 },
            ),
        };
        let b_at = |i: usize| match (kind, k) {
            (Element::F16 | Element::Bf16, 16) => (place * 2 + (i & 1) + if i < 2 { 0 } else { 8 }, group),
            (Element::F16 | Element::Bf16, _) => (place * 2 + (i & 1), group),
            (Element::Tf32, _) => (place + 4 * i, group),
            (Element::S8, _) => (place * 4 + (i & 3) + if i < 4 { 0 } else { 16 }, group),
        };
        for r in 0..a_regs {
            registers.push(
                (0..each)
                    .map(|e| {
                        let (row, col) = a_at(r * each + e);
                        kind.bits(a[row * k + col]) << (e * kind.size())
                    })
                    .sum::<u32>(),
            );
        }
        for r in 0..b_regs {
            registers.push(
                (0..each)
                    .map(|e| {
                        let (row, col) = b_at(r * each + e);
                        kind.bits(b[row * 8 + col]) << (e * kind.size())
                    })
                    .sum::<u32>(),
            );
        }
        let c_at = |i: usize| c[(if i < 2 { group } else { group + 8 }) * 8 + place * 2 + (i & 1)];
        for r in 0..if narrow { 2 } else { 4 } {
            registers.push(match (narrow, kind) {
                (true, _) => {
                    f16::from_f32(c_at(2 * r)).to_bits() as u32
                        | (f16::from_f32(c_at(2 * r + 1)).to_bits() as u32) << 16
                }
                (_, Element::S8) => c_at(r) as i32 as u32,
                _ => c_at(r).to_bits(),
            });
        }
    }
    let c_regs = if narrow { 2 } else { 4 };
    let n = a_regs + b_regs + c_regs;
    let loads: String = (0..n).map(|i| format!("ld.global.u32 %r{}, [%d1+{}];", 20 + i, i * 4)).collect();
    let list = |from: usize, n: usize| {
        format!("{{{}}}", (from..from + n).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(","))
    };
    let (la, lb, lc, ld) =
        (list(20, a_regs), list(20 + a_regs, b_regs), list(20 + a_regs + b_regs, c_regs), list(60, c_regs));
    let stores: String =
        (0..c_regs).map(|i| format!("st.global.u32 [%d2+{}], %r{};", i * 4, 60 + i)).collect();
    let body = format!(
        "mul.wide.u32 %d0, %t, {}; add.u64 %d1, %p0, %d0; {loads} {name} {ld}, {la}, {lb}, {lc}; mul.wide.u32 %d0, %t, 16; add.u64 %d2, %p1, %d0; {stores}",
        n * 4
    );
    let memory = Memory::new(1 << 20);
    let (source, out) = (words(&memory, &registers), words(&memory, &[0; 128]));
    run(&kernel(2, &body), &memory, shape(1, 32), &[source, out]).unwrap_or_else(|f| panic!("{name}: {f}"));
    let found = read_words(&memory, out, 128);
    for lane in 0..32usize {
        for i in 0..4 {
            let (row, col) = (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + (i & 1));
            let wanted = c[row * 8 + col] + (0..k).map(|j| a[row * k + j] * b[j * 8 + col]).sum::<f32>();
            let value = match (narrow, kind) {
                (true, _) => f16::from_bits((found[lane * 4 + i / 2] >> (16 * (i & 1))) as u16).to_f32(),
                (_, Element::S8) => found[lane * 4 + i] as i32 as f32,
                _ => f32::from_bits(found[lane * 4 + i]),
            };
            assert_eq!(value, wanted, "{name} row {row} column {col}");
        }
    }
}

#[test]
fn products_follow_the_fragment_layouts() {
    mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", Element::Bf16, 16, false);
    mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", Element::F16, 16, false);
    mma("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", Element::F16, 16, true);
    mma("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", Element::Bf16, 8, false);
    mma("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", Element::F16, 8, false);
    mma("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16", Element::F16, 8, true);
    mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", Element::Tf32, 8, false);
    mma("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", Element::Tf32, 4, false);
    mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", Element::S8, 32, false);
}

/// How a matrix of `outer` by `k` 16-bit numbers lies in shared memory, by the canonical layouts of the ISA: byte
/// offset of an element.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// 0, or 32, 64, 128 bytes.
    swizzle: usize,
    across: bool,
    leading: usize,
    stride: usize,
}

impl Layout {
    fn place(&self, outer: usize, k: usize) -> usize {
        // In units of 16 bytes a row of the atom has this many.
        let w = (self.swizzle / 16).max(1);
        let linear = match (self.across, self.swizzle) {
            (false, 0) => outer % 8 * 16 + outer / 8 * self.stride + k % 8 * 2 + k / 8 * self.leading,
            (false, _) => outer % 8 * w * 16 + outer / 8 * self.stride + k * 2,
            (true, 0) => outer % 8 * 2 + outer / 8 * self.stride + k % 8 * 16 + k / 8 * self.leading,
            (true, _) => {
                outer % (8 * w) * 2 + outer / (8 * w) * self.leading + k % 8 * w * 16 + k / 8 * self.stride
            }
        };
        // The 16-byte pieces of a row are exchanged by the number of the row in the atom, of which as many bits count
        // as there are pieces.
        let row = linear >> 7;
        let exchange = match self.swizzle {
            0 => 0,
            32 => row & 1,
            64 => row & 3,
            _ => row & 7,
        };
        linear ^ exchange << 4
    }

    fn descriptor(&self, start: &str) -> String {
        let mode = match self.swizzle {
            0 => 0u64,
            128 => 1,
            64 => 2,
            _ => 3,
        };
        let fixed = (self.leading as u64 >> 4) << 16 | (self.stride as u64 >> 4) << 32 | mode << 62;
        format!(
            "cvt.u64.u32 %d9, {start}; and.b64 %d9, %d9, 0x3ffff; shr.u64 %d9, %d9, 4; or.b64 %d9, %d9, {fixed:#x};"
        )
    }
}

/// One `wgmma` with both operands in the given layouts: D = A B or, with a fragment, A from registers.
fn wgmma(layout_a: Option<Layout>, layout_b: Layout, n: usize, bf: bool) {
    let kind = if bf { Element::Bf16 } else { Element::F16 };
    let name = if bf { "bf16" } else { "f16" };
    let (a, b) = (numbers(64 * 16, 4), numbers(16 * n, 5));
    let mut image = vec![0u8; 32768];
    let mut put = |at: usize, x: f32| image[at..at + 2].copy_from_slice(&(kind.bits(x) as u16).to_le_bytes());
    for r in 0..64 {
        for k in 0..16 {
            // Without a layout A is row-major in the first half, from where threads read their fragments.
            put(layout_a.map_or(r * 32 + k * 2, |l| l.place(r, k)), a[r * 16 + k]);
        }
    }
    for c in 0..n {
        for k in 0..16 {
            put(16384 + layout_b.place(c, k), b[k * n + c]);
        }
    }
    let d: Vec<String> = (0..n / 2).map(|i| format!("%f{i}")).collect();
    let zeros: String =
        d.iter().enumerate().map(|(i, d)| format!("mov.f32 {d}, 0f{:08X};", (i as f32).to_bits())).collect();
    let across_a = layout_a.is_some_and(|l| l.across) as u32;
    let (source_a, flags) = match layout_a {
        Some(layout) => (
            format!("{} mov.u64 %d10, %d9;", layout.descriptor("%r3")),
            format!("%d10, %d11, %q1, 1, 1, {across_a}, {}", layout_b.across as u32),
        ),
        None => {
            // Row lane / 4 of the warp's 16, columns 2 (lane % 4).
            let at = "and.b32 %r8, %t, 31; shr.u32 %r9, %t, 5; shr.u32 %r10, %r8, 2; mad.lo.u32 %r10, %r9, 16, %r10; and.b32 %r11, %r8, 3; shl.b32 %r11, %r11, 2; mad.lo.u32 %r10, %r10, 32, %r11; add.u32 %r10, %r10, %r3;
                ld.shared.u32 %r12, [%r10]; ld.shared.u32 %r13, [%r10+256]; ld.shared.u32 %r14, [%r10+16]; ld.shared.u32 %r15, [%r10+272];";
            (
                at.to_string(),
                format!("{{%r12, %r13, %r14, %r15}}, %d11, %q1, 1, 1, {}", layout_b.across as u32),
            )
        }
    };
    let stores: String =
        d.iter().enumerate().map(|(i, d)| format!("st.global.f32 [%d3+{}], {d};", i * 4)).collect();
    let body = format!(
        ".shared .align 1024 .b8 s[32768]; {} mov.u32 %r3, s; {source_a} add.u32 %r16, %r3, 16384; {} mov.u64 %d11, %d9; {zeros} setp.eq.u32 %q1, 0, 0; wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{{}}}, {flags}; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mul.wide.u32 %d2, %t, {}; add.u64 %d3, %p1, %d2; {stores}",
        fill(32768, 128),
        layout_b.descriptor("%r16"),
        d.join(","),
        n * 2
    );
    let memory = Memory::new(1 << 20);
    let (source, out) = (bytes(&memory, &image), memory.allocate(128 * 2 * n as u64).unwrap());
    run(&kernel(2, &body), &memory, shape(1, 128), &[source, out])
        .unwrap_or_else(|f| panic!("{layout_a:?} {layout_b:?}: {f}"));
    let found = read_words(&memory, out, 64 * n);
    for thread in 0..128 {
        for i in 0..n / 2 {
            // The ISA's table of D: row of the warp's 16, and columns by eights.
            let row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            let col = i / 4 * 8 + thread % 4 * 2 + i % 2;
            let wanted = i as f32 + (0..16).map(|k| a[row * 16 + k] * b[k * n + col]).sum::<f32>();
            assert_eq!(
                f32::from_bits(found[thread * (n / 2) + i]),
                wanted,
                "{layout_a:?} {layout_b:?} row {row} column {col}"
            );
        }
    }
}

fn layouts(outer: usize) -> Vec<Layout> {
    let mut all = vec![
        Layout { swizzle: 0, across: false, leading: 128, stride: 256 },
        Layout { swizzle: 0, across: true, leading: outer / 8 * 128, stride: 128 },
    ];
    for swizzle in [32, 64, 128] {
        all.push(Layout { swizzle, across: false, leading: 16, stride: 8 * swizzle });
        // An atom is swizzle / 2 numbers wide and 8 of K deep; then comes the next of the other 8 of K, then the next
        // atoms across.
        if outer.is_multiple_of(swizzle / 2) {
            all.push(Layout { swizzle, across: true, leading: 16 * swizzle, stride: 8 * swizzle });
        }
    }
    all
}

#[test]
fn warpgroup_products_read_every_layout() {
    let plain = Layout { swizzle: 0, across: false, leading: 128, stride: 256 };
    for layout in layouts(64) {
        wgmma(Some(layout), plain, 64, true);
        wgmma(Some(plain), layout, 64, false);
    }
    for n in [8, 128, 256] {
        wgmma(Some(plain), plain, n, true);
    }
    wgmma(None, plain, 64, true);
}

#[test]
fn accumulators_wait_for_the_product() {
    let memory = Memory::new(1 << 20);
    let body = |wait: &str, touch: &str| {
        format!(
            ".shared .align 1024 .b8 s[4096]; mad.lo.u32 %r1, %t, 32, 0; mov.u32 %r2, s; add.u32 %r1, %r1, %r2; st.shared.v4.u32 [%r1], {{0, 0, 0, 0}}; st.shared.v4.u32 [%r1+16], {{0, 0, 0, 0}}; fence.proxy.async; bar.sync 0;
            mov.u64 %d1, 0x0000001000080000; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; setp.eq.u32 %q1, 0, 0; wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %d1, %d1, %q1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned; {wait} \n.loc 1 77 1\n {touch}"
        )
    };
    let text = |wait, touch| format!(".file 1 \"a.cu\"\n{}", kernel(0, &body(wait, touch)));
    run(&text("wgmma.wait_group.sync.aligned 0;", "add.f32 %f9, %f2, %f2;"), &memory, shape(1, 128), &[])
        .unwrap();
    let fault = run(&text("", "add.f32 %f9, %f2, %f2;"), &memory, shape(1, 128), &[]).unwrap_err();
    assert_eq!((fault.kind, fault.at.clone().unwrap().line), (FaultKind::Pending, 77), "{fault}");
    // A compiler's move to another register passes the wait on to that.
    let fault =
        run(&text("", "mov.f32 %f8, %f2; add.f32 %f9, %f8, %f8;"), &memory, shape(1, 128), &[]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Pending);
    run(
        &text("", "mov.f32 %f8, %f2; wgmma.wait_group.sync.aligned 0; add.f32 %f9, %f8, %f8;"),
        &memory,
        shape(1, 128),
        &[],
    )
    .unwrap();
}
