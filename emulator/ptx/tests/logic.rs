//! Bits, held against the pseudo-code of the PTX ISA, bit by bit.

mod common;
use common::{check, check_body, low, size, value};

fn bit(x: u64, at: u32) -> u64 {
    x >> at & 1
}

#[test]
fn logic_is_bitwise() {
    for kind in ["b16", "b32", "b64"] {
        check(&format!("and.{kind}"), &[kind, kind], kind, |x| x[0] & x[1]);
        check(&format!("or.{kind}"), &[kind, kind], kind, |x| x[0] | x[1]);
        check(&format!("xor.{kind}"), &[kind, kind], kind, |x| x[0] ^ x[1]);
        check(&format!("not.{kind}"), &[kind], kind, |x| low(!x[0] as i128, kind));
        check(&format!("cnot.{kind}"), &[kind], kind, |x| (x[0] == 0) as u64);
        check(&format!("mov.{kind}"), &[kind], kind, |x| x[0]);
    }
    for table in [0u64, 0x80, 0xfe, 0x96, 0xe8, 0xca, 0x1b, 0xff] {
        check_body(&format!("lop3.b32 %out, %a, %b, %c, {table:#x};"), &["b32"; 3], "b32", |x| {
            (0..32)
                .map(|i| bit(table, (bit(x[0], i) << 2 | bit(x[1], i) << 1 | bit(x[2], i)) as u32) << i)
                .sum()
        });
    }
}

#[test]
fn logic_of_predicates() {
    let both = |op: &str, f: fn(u64, u64) -> u64| {
        let body = format!("setp.ne.b16 %q0, %a, 0; setp.ne.b16 %q1, %b, 0; {op} selp.b16 %out, 1, 0, %q2;");
        check_body(&body, &["b16", "b16"], "b16", |x| f((x[0] != 0) as u64, (x[1] != 0) as u64));
    };
    both("and.pred %q2, %q0, %q1;", |a, b| a & b);
    both("or.pred %q2, %q0, %q1;", |a, b| a | b);
    both("xor.pred %q2, %q0, %q1;", |a, b| a ^ b);
    both("not.pred %q2, %q0;", |a, _| 1 - a);
    both("mov.pred %q2, %q0;", |a, _| a);
}

#[test]
fn shifts_clamp_their_amount() {
    for kind in ["b16", "b32", "b64"] {
        let bits = size(kind) * 8;
        check(&format!("shl.{kind}"), &[kind, "u32"], kind, |x| {
            if x[1] >= bits as u64 { 0 } else { low((x[0] as u128).wrapping_shl(x[1] as u32) as i128, kind) }
        });
    }
    for kind in ["u16", "s16", "u32", "s32", "u64", "s64", "b32"] {
        let bits = size(kind) as u64 * 8;
        check(&format!("shr.{kind}"), &[kind, "u32"], kind, |x| {
            low(value(x[0], kind) >> x[1].min(bits), kind)
        });
    }
}

#[test]
fn funnel_shifts_take_32_of_64_bits() {
    let pair = |x: &[u64]| (x[1] << 32 | x[0]) as u128;
    check("shf.l.wrap.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) << (x[2] & 31) >> 32) as i128, "b32")
    });
    check("shf.l.clamp.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) << x[2].min(32) >> 32) as i128, "b32")
    });
    check("shf.r.wrap.b32", &["b32", "b32", "u32"], "b32", |x| low((pair(x) >> (x[2] & 31)) as i128, "b32"));
    check("shf.r.clamp.b32", &["b32", "b32", "u32"], "b32", |x| {
        low((pair(x) >> x[2].min(32)) as i128, "b32")
    });
}

#[test]
fn fields_are_extracted_and_inserted() {
    for kind in ["u32", "s32", "u64", "s64"] {
        let msb = size(kind) * 8 - 1;
        check(&format!("bfe.{kind}"), &[kind, "u32", "u32"], kind, |x| {
            let (pos, len) = ((x[1] & 0xff) as u32, (x[2] & 0xff) as u32);
            let sign =
                if kind.starts_with('u') || len == 0 { 0 } else { bit(x[0], (pos + len - 1).min(msb)) };
            (0..=msb).map(|i| (if i < len && pos + i <= msb { bit(x[0], pos + i) } else { sign }) << i).sum()
        });
    }
    for kind in ["b32", "b64"] {
        let msb = size(kind) * 8 - 1;
        check(&format!("bfi.{kind}"), &[kind, kind, "u32", "u32"], kind, |x| {
            let (pos, len) = ((x[2] & 0xff) as u32, (x[3] & 0xff) as u32);
            let mut f = x[1];
            for i in (0..len).take_while(|i| pos + i <= msb) {
                f = f & !(1 << (pos + i)) | bit(x[0], i) << (pos + i);
            }
            f
        });
    }
}

#[test]
fn bits_are_counted_found_and_reversed() {
    for kind in ["b32", "b64"] {
        let bits = size(kind) * 8;
        check(&format!("popc.{kind}"), &[kind], "u32", |x| (0..bits).map(|i| bit(x[0], i)).sum());
        check(&format!("clz.{kind}"), &[kind], "u32", |x| {
            (0..bits).rev().take_while(|&i| bit(x[0], i) == 0).count() as u64
        });
        check(&format!("brev.{kind}"), &[kind], kind, |x| {
            (0..bits).map(|i| bit(x[0], i) << (bits - 1 - i)).sum()
        });
    }
    for kind in ["u32", "s32", "u64", "s64"] {
        let msb = size(kind) * 8 - 1;
        let find = |x: u64| {
            let x = if kind.starts_with('s') && bit(x, msb) == 1 { !x } else { x };
            (0..=msb).rev().find(|&i| bit(x, i) == 1)
        };
        check(&format!("bfind.{kind}"), &[kind], "u32", |x| find(x[0]).map_or(0xffff_ffff, |i| i as u64));
        check(&format!("bfind.shiftamt.{kind}"), &[kind], "u32", |x| {
            find(x[0]).map_or(0xffff_ffff, |i| (msb - i) as u64)
        });
    }
}

#[test]
fn masks_and_extensions() {
    check("bmsk.clamp.b32", &["b32", "b32"], "b32", |x| {
        (0..32).map(|i: u64| ((i >= x[0] && i < x[0] + x[1]) as u64) << i).sum()
    });
    check("bmsk.wrap.b32", &["b32", "b32"], "b32", |x| {
        (0..32).map(|i: u64| ((i >= x[0] & 31 && i < (x[0] & 31) + (x[1] & 31)) as u64) << i).sum()
    });
    for (mode, wrap) in [("clamp", false), ("wrap", true)] {
        for kind in ["u32", "s32"] {
            check(&format!("szext.{mode}.{kind}"), &[kind, "u32"], kind, |x| {
                let n = if wrap { x[1] & 31 } else { x[1] };
                if n == 0 {
                    return 0;
                }
                let sign = if kind == "s32" && n < 32 { bit(x[0], n as u32 - 1) } else { 0 };
                (0..32).map(|i: u64| (if i < n { bit(x[0], i as u32) } else { sign }) << i).sum()
            });
        }
    }
}

#[test]
fn bytes_are_permuted() {
    let byte = |x: &[u64], i: u64| (if i < 4 { x[0] >> (8 * i) } else { x[1] >> (8 * (i - 4)) }) & 0xff;
    check("prmt.b32", &["b32", "b32", "b32"], "b32", |x| {
        (0..4)
            .map(|i| {
                let s = x[2] >> (4 * i) & 15;
                let b = byte(x, s & 7);
                (if s & 8 == 0 { b } else { (b >> 7) * 0xff }) << (8 * i)
            })
            .sum()
    });
    // The tables of the ISA, most significant byte first, for selectors 0 to 3.
    let tables: [(&str, [[u64; 4]; 4]); 6] = [
        ("f4e", [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        ("b4e", [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        ("rc8", [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecl", [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecr", [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        ("rc16", [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ];
    for (mode, table) in tables {
        check(&format!("prmt.b32.{mode}"), &["b32", "b32", "b32"], "b32", |x| {
            let row = table[(x[2] & 3) as usize];
            (0..4).map(|i| byte(x, row[3 - i as usize]) << (8 * i)).sum()
        });
    }
}

#[test]
fn registers_are_packed_and_unpacked() {
    check_body("mov.b32 %out, {%a, %b};", &["b16", "b16"], "b32", |x| x[0] | x[1] << 16);
    check_body("mov.b64 %out, {%a, %b};", &["b32", "b32"], "b64", |x| x[0] | x[1] << 32);
    check_body("mov.b64 %out, {%a, %b, %c, %e};", &["b16"; 4], "b64", |x| {
        x[0] | x[1] << 16 | x[2] << 32 | x[3] << 48
    });
    check_body("mov.b32 {%h1, %out}, %a;", &["b32"], "b16", |x| x[0] >> 16);
    check_body("mov.b32 {%out, _}, %a;", &["b32"], "b16", |x| x[0] & 0xffff);
    check_body("mov.b64 {_, %out}, %a;", &["b64"], "b32", |x| x[0] >> 32);
    check_body("mov.b64 {%h1, %h2, %out, %h3}, %a;", &["b64"], "b16", |x| x[0] >> 32 & 0xffff);
}
