//! The counters of all launches, by kernel, and where they go when the process ends.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;

use phalanx_emulator_link::lock;
use phalanx_ptx::{Counters, Kernel, Loaded};

use crate::settings::{COUNTERS, CountersTo, settings};
use crate::status::say;

static COUNTED: Mutex<BTreeMap<String, Counters>> = Mutex::new(BTreeMap::new());

/// A kernel of a module has run. Kernels of one name in different files are counted by themselves.
pub(crate) fn add(loaded: &Loaded, kernel: &str, counters: &Counters) {
    if counters.launches == 0 {
        return;
    }
    let file = loaded.module().kernel(kernel).and_then(Kernel::file);
    let name = file.map_or(kernel.into(), |file| format!("{file} {kernel}"));
    lock(&COUNTED).entry(name).or_default().add(counters);
}

/// The first line of the file.
const COLUMNS: &str = "kernel\tlaunches\tglobal requests\tsectors\tsectors needed\tshared requests\tphases\twavefronts\tlongest thread\tinstructions\tthreads";

/// Writes what was counted to where the settings say.
pub(crate) fn write() {
    let counted = lock(&COUNTED);
    match &settings().counters {
        CountersTo::Nowhere => {}
        CountersTo::Print => {
            counted.iter().for_each(|(kernel, all)| say(&format!("kernel {kernel:?}: {all}")))
        }
        CountersTo::File(path) => {
            if let Err(error) = std::fs::write(path, table(&counted)) {
                say(&format!("{COUNTERS}: {}: {error}", path.display()));
            }
        }
    }
}

fn table(counted: &BTreeMap<String, Counters>) -> String {
    let mut text = format!("{COLUMNS}\n");
    for (kernel, all) in counted {
        let (t, b) = (all.traffic(), all.balance);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{kernel}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            all.launches,
            t.global_requests,
            t.sectors,
            t.sectors_min,
            t.shared_requests,
            t.phases,
            t.wavefronts,
            b.longest,
            b.instructions,
            b.threads
        );
    }
    text
}
