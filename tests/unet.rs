//! The memory that the example `gpipe_unet` counts on meta devices is what CPUs need, to the byte.

#[path = "../examples/gpipe_unet/memory.rs"]
#[allow(dead_code)] // the table
mod memory;
#[path = "../examples/gpipe_unet/unet.rs"]
mod unet;

use phalanx::Device;

use unet::UNet;

/// What the example's modules have of its main file.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn say(line: &str) {
    println!("{line}");
}

const NET: UNet = UNet { depth: 2, convs: 2, channels: 4 };

/// Of two training steps.
fn peak(kind: fn(u16) -> Device, balance: &[usize], micro_batches: usize) -> usize {
    let devices: Vec<Device> = (0..balance.len() as u16).map(kind).collect();
    memory::measure(NET, balance, &devices, micro_batches, [8, 16]).unwrap().1
}

#[test]
fn the_peak_of_meta_devices_is_that_of_cpus() {
    let layers = NET.layers().len();
    for (balance, micro_batches) in
        [(&[layers][..], 1), (&[layers], 4), (&[layers / 2, layers - layers / 2], 1)]
    {
        let [counted, needed] = [Device::Meta, Device::Cpu].map(|kind| peak(kind, balance, micro_batches));
        assert_eq!(counted, needed, "{balance:?}, {micro_batches} micro-batches");
    }
    let recomputed = [4, 1].map(|micro_batches| peak(Device::Meta, &[layers], micro_batches));
    assert!(recomputed[0] < recomputed[1] / 2, "of four micro-batches three are recomputed: {recomputed:?}");
}
