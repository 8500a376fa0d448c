//! safetensors, npy and atomic files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use phalanx_tensor::io::{self, SafeTensors, atomic};
use phalanx_tensor::{DType, Device, Error, Result, Tensor};
use proptest::prelude::*;

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("phalanx-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One tensor of every dtype, some of them strided.
fn samples() -> Vec<(String, Tensor)> {
    let make = |dtype: DType| {
        let top = if dtype == DType::Bool { 2 } else { 120 };
        let bytes: Vec<u8> = (0..6 * dtype.size()).map(|i| (i * 7 % top) as u8).collect();
        let x = Tensor::from_bytes(&bytes, &[2, 3], dtype, Device::CPU).unwrap();
        if dtype.is_float() { x.transpose(0, 1).unwrap() } else { x }
    };
    DType::ALL.into_iter().map(|dtype| (format!("layer \"{dtype}\" ü\n"), make(dtype))).collect()
}

fn refused(path: &Path) -> String {
    let error = SafeTensors::open(path).unwrap_err();
    assert!(matches!(error, Error::File { .. }));
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.lines().count() == 1, "{text}");
    text
}

#[test]
fn safetensors_round_trips_every_dtype_and_agrees_with_the_reference() -> Result<()> {
    let folder = Folder::new("round");
    let path = folder.file("a.safetensors");
    let mut all = samples();
    all.push(("empty".into(), Tensor::zeros(&[3, 0], DType::F32, Device::CPU)?));
    all.push(("scalar".into(), Tensor::scalar(2.5f64, Device::CPU)?));
    let metadata = BTreeMap::from([("format".to_string(), "pt \"x\"".to_string())]);
    io::save_safetensors(&path, all.iter().map(|(n, t)| (n.as_str(), t)), &metadata)?;
    let bytes = std::fs::read(&path).unwrap();

    let ours = SafeTensors::open(&path)?;
    assert_eq!((ours.names().len(), ours.metadata()), (all.len(), &metadata));
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.len(), all.len());
    for (name, tensor) in &all {
        let read = ours.tensor(name, Device::Cpu(1))?;
        assert_eq!(
            (read.shape(), read.dtype(), read.device()),
            (tensor.shape(), tensor.dtype(), Device::Cpu(1))
        );
        assert_eq!((ours.shape(name)?, ours.dtype(name)?), (tensor.shape(), tensor.dtype()));
        assert_eq!(read.to_bytes()?, tensor.to_bytes()?, "{name}");
        let reference = theirs.tensor(name).unwrap();
        assert_eq!(
            (reference.shape(), reference.data()),
            (tensor.shape(), &tensor.to_bytes()?[..]),
            "{name}"
        );
        assert_eq!(ours.tensor(name, Device::Meta(0))?.shape(), tensor.shape());
    }
    all.reverse();
    io::save_safetensors(&path, all.iter().map(|(n, t)| (n.as_str(), t)), &metadata)?;
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "equal content makes equal bytes");
    assert_eq!(folder.names(), ["a.safetensors"]);
    Ok(())
}

#[test]
fn headers_of_any_length_are_written() -> Result<()> {
    let folder = Folder::new("long");
    let path = folder.file("many.safetensors");
    let x = Tensor::scalar(1u8, Device::CPU)?;
    io::save_safetensors(&path, (0..3000).map(|i| (format!("layers.{i}.weight"), &x)), &BTreeMap::new())?;
    let file = SafeTensors::open(&path)?;
    assert_eq!(
        (file.names().len(), file.tensor("layers.2999.weight", Device::CPU)?.item::<u8>()?),
        (3000, 1)
    );
    Ok(())
}

#[test]
fn files_of_the_reference_are_read_and_foreign_dtypes_named() -> Result<()> {
    use safetensors::{Dtype, tensor::TensorView};
    let folder = Folder::new("reference");
    let path = folder.file("b.safetensors");
    let (floats, shorts) = ([1f32.to_le_bytes(), 2f32.to_le_bytes()].concat(), [0u8; 6]);
    let views = [
        ("x", TensorView::new(Dtype::F32, vec![2], &floats).unwrap()),
        ("odd", TensorView::new(Dtype::U16, vec![3], &shorts).unwrap()),
    ];
    let metadata = Some(HashMap::from([("k".to_string(), "v".to_string())]));
    safetensors::serialize_to_file(views, metadata, &path).unwrap();
    let file = SafeTensors::open(&path)?;
    assert_eq!(file.tensor("x", Device::CPU)?.to_vec::<f32>()?, [1., 2.]);
    assert_eq!(file.metadata()["k"], "v");
    let error = file.tensor("odd", Device::CPU).unwrap_err().to_string();
    assert!(error.contains("\"odd\"") && error.contains("U16"), "{error}");
    assert!(file.tensor("none", Device::CPU).unwrap_err().to_string().contains("\"none\""));
    Ok(())
}

#[test]
fn damaged_headers_get_one_clear_line() {
    let folder = Folder::new("damaged");
    let path = folder.file("c.safetensors");
    let refuse = |header: &str, data: usize, wanted: &str| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        std::fs::write(&path, bytes).unwrap();
        let text = refused(&path);
        assert!(text.contains(wanted), "{text}");
    };
    let one = |offsets: &str| format!(r#"{{"w":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#);
    refuse(&one("[0,8]"), 7, "\"w\"");
    refuse(&one("[0,8]"), 9, "account for 8 of 9");
    refuse(&one("[4,12]"), 12, "\"w\"");
    refuse(&one("[8,0]"), 8, "ascending");
    refuse(&one("[0,18446744073709551615]"), 8, "\"w\"");
    refuse(&one("[0,-8]"), 8, "\"w\"");
    refuse(r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0, "\"w\"");
    refuse(
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
        6,
        "\"b\"",
    );
    for shape in ["4611686018427387904,4,0", "0,4611686018427387904,4", "0,9223372036854775808"] {
        let one = format!(r#"{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}}}"#);
        refuse(&one, 0, "\"w\"");
    }
    refuse("[1,2", 0, "JSON");
    refuse(&"[".repeat(100_000), 0, "JSON");
    refuse(r#"{"__metadata__":{"a":5}}"#, 0, "__metadata__");
    for (bytes, wanted) in [
        (vec![], "0 bytes"),
        (vec![1, 2, 3], "3 bytes"),
        (vec![0xff; 100], "18446744073709551615"),
        ([&99_999_999u64.to_le_bytes()[..], b"{}"].concat(), "99999999"),
        ([&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat(), "UTF-8"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let text = refused(&path);
        assert!(text.contains(wanted), "{text}");
    }
    refused(&folder.file("missing"));
    refused(&folder.0);
}

/// A safetensors file and an npy file.
static SOUND: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let folder = Folder::new("sound");
    let (path, npy, all) = (folder.file("d"), folder.file("e"), samples());
    io::save_safetensors(&path, all.iter().map(|(n, t)| (n.as_str(), t)), &BTreeMap::new()).unwrap();
    io::save_npy(&npy, &all[1].1).unwrap();
    [path, npy].map(|path| std::fs::read(path).unwrap())
});

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_makes_a_reader_panic(flips in prop::collection::vec((0usize..700, 0u8..8), 1..4), cut in 0usize..900) {
        let folder = Folder::new(&format!("flip-{cut}-{}", flips[0].0));
        let (path, npy) = (folder.file("d"), folder.file("e"));
        for (path, sound) in [&path, &npy].into_iter().zip(&*SOUND) {
            let mut bytes = sound.clone();
            for &(at, bit) in &flips {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
            bytes.truncate(cut.max(1));
            std::fs::write(path, bytes).unwrap();
        }
        if let Ok(file) = SafeTensors::open(&path) {
            let _ = file.names().map(|name| file.tensor(name, Device::CPU)).collect::<Vec<_>>();
        }
        let _ = io::load_npy(&npy, Device::CPU);
    }
}

#[test]
fn saving_refuses_bad_names_and_meta_tensors_and_leaves_nothing() -> Result<()> {
    let folder = Folder::new("refuse");
    let path = folder.file("f.safetensors");
    let (x, meta) =
        (Tensor::zeros(&[2], DType::F32, Device::CPU)?, Tensor::zeros(&[2], DType::F32, Device::Meta(0))?);
    let save = |list: &[(&str, &Tensor)]| io::save_safetensors(&path, list.iter().copied(), &BTreeMap::new());
    assert!(save(&[("a", &x), ("a", &x)]).unwrap_err().to_string().contains("\"a\""));
    assert!(save(&[("__metadata__", &x)]).is_err());
    let error = save(&[("a", &x), ("ghost", &meta)]).unwrap_err().to_string();
    assert!(error.contains("\"ghost\"") && error.contains("meta:0"), "{error}");
    assert_eq!(folder.names(), [""; 0]);
    Ok(())
}

#[test]
fn a_failed_write_keeps_the_old_file_and_leaves_no_other() -> Result<()> {
    let folder = Folder::new("atomic");
    let path = folder.file("config.json");
    atomic::write(&path, |file| file.write_all(b"old"))?;
    let failed = atomic::write(&path, |file| {
        file.write_all(&[0; 3 << 20])?;
        Err(std::io::Error::other("no more"))
    });
    assert!(failed.unwrap_err().to_string().contains("no more"));
    let typed = atomic::write(&path, |_| Err(std::io::Error::other(Error::invalid("mine", "kept"))));
    assert!(matches!(typed, Err(Error::Invalid { op: "mine", .. })));
    let panicking = || atomic::write(&path, |_| panic!("in the middle"));
    assert!(std::panic::catch_unwind(panicking).is_err());
    assert_eq!(
        (std::fs::read(&path).unwrap(), folder.names()),
        (b"old".to_vec(), vec!["config.json".into()])
    );
    atomic::write(&path, |file| file.write_all(b"new"))?;
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
    assert!(atomic::write(folder.file("no/such"), |_| Ok(())).is_err());
    assert!(atomic::write("/", |_| Ok(())).is_err());
    Ok(())
}

#[test]
fn npy_round_trips_every_dtype_it_has_in_both_orders() -> Result<()> {
    let folder = Folder::new("npy");
    let path = folder.file("x.npy");
    for (name, x) in samples() {
        if x.dtype() == DType::BF16 {
            assert!(io::save_npy(&path, &x).unwrap_err().to_string().contains("bf16"));
            continue;
        }
        for x in [x.clone(), x.contiguous()?, x.i((.., ..1))?, x.i(0)?, x.i((0, 0))?, x.i(1..1)?] {
            io::save_npy(&path, &x)?;
            let read = io::load_npy(&path, Device::CPU)?;
            assert_eq!((read.shape(), read.dtype()), (x.shape(), x.dtype()), "{name}");
            assert_eq!(read.to_bytes()?, x.to_bytes()?, "{name}");
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!((bytes.len() - x.numel() * x.dtype().size()) % 64, 0);
        }
    }
    assert_eq!(folder.names(), ["x.npy"]);
    let wrong = io::load_npy_as(&path, DType::F32, Device::CPU).unwrap_err().to_string();
    assert!(wrong.contains("bool") && wrong.contains("wanted f32"), "{wrong}");
    Ok(())
}

/// A file as NumPy writes it.
fn npy(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = b"\x93NUMPY".to_vec();
    out.extend([version, 0]);
    match version {
        1 => out.extend((header.len() as u16).to_le_bytes()),
        _ => out.extend((header.len() as u32).to_le_bytes()),
    }
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

#[test]
fn npy_reads_what_numpy_writes_and_says_what_it_cannot_read() -> Result<()> {
    let header = "{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }          \n";
    let data: Vec<u8> = (0..6i32).flat_map(i32::to_le_bytes).collect();
    for version in [1, 2, 3] {
        let x = io::read_npy(&npy(version, header, &data), Device::CPU)?;
        assert_eq!((x.shape(), x.to_vec::<i32>()?), (&[2, 3][..], vec![0, 2, 4, 1, 3, 5]));
    }
    let python2 = r#"{"shape": (6L,), "fortran_order": False, "descr": "=i4"}"#;
    assert_eq!(io::read_npy(&npy(1, python2, &data), Device::CPU)?.shape(), [6]);
    let with = |descr: &str, shape: &str| {
        npy(1, &format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"), &data)
    };
    let mut cut = with("'<i4'", "(6,)");
    cut.pop();
    for (bytes, wanted) in [
        (with("'>i4'", "(6,)"), ">i4"),
        (with("'<c8'", "(3,)"), "<c8"),
        (with("[('a', '<i4')]", "(6,)"), "wanted '\\''"),
        (with("'<i4'", "(7,)"), "24 bytes"),
        (with("'<i4'", "(4294967296, 4294967296)"), "24 bytes"),
        (with("'<i4'", "(0, 4611686018427387904, 4)"), "24 bytes"),
        (with("'<i4'", "(99999999999999999999,)"), "size"),
        (with("'<i4'", "(-6,)"), "size"),
        (cut, "23 bytes"),
        (npy(4, header, &data), "version 4"),
        (npy(1, "{'descr': '<i4'}", &data), "lacks"),
        (npy(2, header, &[])[..20].to_vec(), "ends inside"),
        (b"PK\x03\x04".to_vec(), "NUMPY"),
        (vec![], "NUMPY"),
    ] {
        let error = io::read_npy(&bytes, Device::CPU).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.lines().count() == 1, "{error}");
    }
    let mut long = Vec::new();
    io::write_npy(&mut long, &Tensor::zeros(&[1; 30_000], DType::U8, Device::CPU)?)?;
    assert_eq!((long[6], io::read_npy(&long, Device::CPU)?.rank()), (2, 30_000));
    Ok(())
}
