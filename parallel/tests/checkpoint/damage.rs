//! What is damaged, cut, missing or foreign is refused, with an error that names it; nothing panics.

use std::fs;
use std::path::Path;

use phalanx_parallel::checkpoint::Checkpoint;
use phalanx_parallel::part::Part;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::{Place, save, settings};

fn tensor(n: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..n).map(|i| (i * i) as f32).collect();
    phalanx_kernels::cast(&Tensor::from_slice(&values, &[n], Device::CPU).unwrap(), dtype).unwrap()
}

fn parts() -> Vec<Part> {
    let moments = tensor(33, DType::F64).with_shape(&[3, 11]).unwrap();
    vec![Part::whole("w", tensor(50, DType::F32)), Part::whole("v", moments)]
}

fn saved(place: &Place, ranks: usize) -> std::path::PathBuf {
    let folder = place.join("saved");
    launch::threads(ranks, |rank| save(&rank, &folder, parts(), &settings(7))).unwrap();
    folder
}

/// The bytes that are read.
fn read(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let saved = Checkpoint::open(folder)?;
    saved.verify()?;
    assert_eq!(saved.settings(), &settings(7));
    let parts: Vec<Part> =
        parts().into_iter().map(|p| Part { values: p.values.zeros_like().unwrap(), ..p }).collect();
    saved.read(&parts)?;
    parts.iter().map(|part| Ok(part.values.to_bytes()?)).collect()
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let place = Place::new("flips");
    let folder = saved(&place, 2);
    read(&folder).unwrap();
    for name in ["rank-0.safetensors", "rank-1.safetensors", "checkpoint.json"] {
        let path = folder.join(name);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&path, &damaged).unwrap();
            let error = read(&folder).expect_err(&format!("{name}, byte {at}")).to_string();
            assert!(error.contains(name), "{error}");
            if at % 5 == 0 {
                fs::write(&path, &bytes[..at]).unwrap();
                let error = read(&folder).expect_err(&format!("{name}, cut at {at}")).to_string();
                assert!(error.contains(name), "{error}");
            }
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        assert!(read(&folder).is_err(), "{name}, longer");
        fs::remove_file(&path).unwrap();
        assert!(read(&folder).unwrap_err().to_string().contains(name));
        fs::write(&path, &bytes).unwrap();
    }
    read(&folder).unwrap();
}

#[test]
fn an_index_that_was_made_up_is_refused() {
    let place = Place::new("made-up");
    let folder = saved(&place, 1);
    let path = folder.join("checkpoint.json");
    let text = fs::read_to_string(&path).unwrap();
    // Without its own checksum the index says anything.
    let rest = text.split_once(',').unwrap().1;
    for (was, is) in [
        ("\"version\":1", "\"version\":2"),
        ("\"block\":64", "\"block\":0"),
        ("\"block\":64", "\"block\":12"),
        ("\"name\":\"rank-0.safetensors\"", "\"name\":\"../rank-0.safetensors\""),
        ("\"file\":0", "\"file\":9"),
        ("\"shape\":[3,11]", "\"shape\":[3,12]"),
        ("\"shape\":[3,11]", "\"shape\":[18446744073709551615,11]"),
        ("\"end\":50", "\"end\":51"),
        ("\"dtype\":\"f64\"", "\"dtype\":\"f99\""),
        ("\"dtype\":\"f64\"", "\"dtype\":\"f32\""),
        ("\"offset\":[0]", "\"offset\":[1]"),
        ("\"offset\":[0]", "\"offset\":[18446744073709551615]"),
        ("\"offset\":[0]", "\"offset\":[]"),
    ] {
        assert!(rest.contains(was), "{was} in {rest}");
        let rest = rest.replacen(was, is, 1);
        let checksum = Xxh64::of(rest.as_bytes());
        fs::write(&path, format!("{{\"checksum\":\"{checksum:016x}\",{rest}")).unwrap();
        let error = Checkpoint::open(&folder).expect_err(is).to_string();
        assert!(error.contains("checkpoint.json") || error.contains("rank-0"), "{error}");
    }
}

/// XXH64 of the index's length is not at hand here, so the plain definition stands in as a twin.
struct Xxh64;

impl Xxh64 {
    fn of(bytes: &[u8]) -> u64 {
        const P: [u64; 5] = [
            11400714785074694791,
            14029467366897019727,
            1609587929392839161,
            9650029242287828579,
            2870177450012600261,
        ];
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let round = |a: u64, w: u64| a.wrapping_add(w.wrapping_mul(P[1])).rotate_left(31).wrapping_mul(P[0]);
        let (mut at, mut hash) = (0, P[4]);
        if bytes.len() >= 32 {
            let mut v = [P[0].wrapping_add(P[1]), P[1], 0, P[0].wrapping_neg()];
            while at + 32 <= bytes.len() {
                (0..4).for_each(|i| v[i] = round(v[i], word(at + 8 * i)));
                at += 32;
            }
            hash = [1, 7, 12, 18].iter().zip(v).fold(0, |h: u64, (&r, v)| h.wrapping_add(v.rotate_left(r)));
            v.iter().for_each(|&v| hash = (hash ^ round(0, v)).wrapping_mul(P[0]).wrapping_add(P[3]));
        }
        hash = hash.wrapping_add(bytes.len() as u64);
        while at + 8 <= bytes.len() {
            hash = (hash ^ round(0, word(at))).rotate_left(27).wrapping_mul(P[0]).wrapping_add(P[3]);
            at += 8;
        }
        if at + 4 <= bytes.len() {
            let half = u64::from(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
            hash = (hash ^ half.wrapping_mul(P[0])).rotate_left(23).wrapping_mul(P[1]).wrapping_add(P[2]);
            at += 4;
        }
        for &byte in &bytes[at..] {
            hash = (hash ^ u64::from(byte).wrapping_mul(P[4])).rotate_left(11).wrapping_mul(P[0]);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(P[1]);
        hash = (hash ^ (hash >> 29)).wrapping_mul(P[2]);
        hash ^ (hash >> 32)
    }
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    let place = Place::new("fit");
    let saved = Checkpoint::open(saved(&place, 1)).unwrap();
    let part = |name: &str, values: Tensor| Part::whole(name, values);
    let seven = || phalanx_kernels::full(&[50], 7.0, DType::F32, Device::CPU).unwrap();
    for (wrong, says) in [
        (part("x", tensor(50, DType::F32)), "missing: x"),
        (part("v", tensor(34, DType::F64)), "got [3, 11], wanted [34]"),
        (part("v", tensor(33, DType::F32)), "saved as f64, wanted f32"),
        (part("v", tensor(66, DType::F64).slice(0, 0, 66, 2).unwrap()), "contiguous"),
        (Part { range: 0..60, ..part("w", tensor(60, DType::F32)) }, "got [50], wanted [60]"),
        (Part { range: 1..51, ..part("w", seven()) }, "elements 1..51"),
    ] {
        let fitting = part("w", seven());
        let error = saved.read(&[fitting.clone(), wrong]).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(fitting.values.to_vec::<f32>().unwrap(), [7.0; 50]);
    }
    let narrow = part("v", tensor(33, DType::F32).zeros_like().unwrap());
    saved.read_converted(std::slice::from_ref(&narrow)).unwrap();
    assert_eq!(narrow.values.to_vec::<f32>().unwrap(), tensor(33, DType::F32).to_vec::<f32>().unwrap());
}

#[test]
fn a_tensor_that_no_rank_wants_is_named_on_all() {
    let place = Place::new("unwanted");
    let folder = saved(&place, 1);
    let run = |rank: launch::Rank| -> Result<String> {
        let mine = &parts()[..rank.rank().min(1)];
        Ok(Checkpoint::open(&folder)?.load(rank.comm(), mine).unwrap_err().to_string())
    };
    for error in launch::threads(3, run).unwrap() {
        assert!(error.contains("unexpected: v") && !error.contains("w,"), "{error}");
    }
    let run = |rank: launch::Rank| -> Result<()> {
        Checkpoint::open(&folder)?.load(rank.comm(), &parts()[rank.rank()..][..1])
    };
    launch::threads(2, run).unwrap();
}

#[test]
fn what_goes_wrong_on_one_rank_all_hear() {
    let place = Place::new("hear");
    let folder = saved(&place, 1);
    let run = |rank: launch::Rank| -> Result<String> {
        let names = ["w", "w", "other"];
        let part = Part { name: names[rank.rank()].into(), ..parts().remove(0) };
        Ok(Checkpoint::open(&folder)?.load(rank.comm(), &[part]).unwrap_err().to_string())
    };
    for error in launch::threads(3, run).unwrap() {
        assert!(error.contains("rank 2") && error.contains("missing: other"), "{error}");
    }
}

#[test]
fn folders_without_a_checkpoint_are_refused() {
    let place = Place::new("none");
    assert!(Checkpoint::open(place.join("nothing")).unwrap_err().to_string().contains("nothing"));
    fs::create_dir(place.join("foreign")).unwrap();
    fs::write(place.join("foreign/checkpoint.json"), "{\"step\": 3}").unwrap();
    let error = Checkpoint::open(place.join("foreign")).unwrap_err().to_string();
    assert!(error.contains("no checkpoint"), "{error}");
    fs::create_dir(place.join("other")).unwrap();
    fs::write(place.join("other/thesis.tex"), "..").unwrap();
    let run = |rank: launch::Rank| save(&rank, &place.join("other"), parts(), &settings(7));
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("is there and is no checkpoint"), "{error}");
    assert!(place.join("other/thesis.tex").exists());
}
