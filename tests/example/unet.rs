//! The U-Net example: torchgpipe's parameter counts, one device's bits, a picture.

use std::process::Stdio;

use super::{Folder, example};

#[test]
fn the_unet_has_torchgpipes_parameters_and_one_devices_losses_and_is_drawn() {
    let folder = Folder::new("unet");
    let picture = folder.path("timeline.svg");
    let mut run = example("gpipe_unet");
    let output = run.args([&picture, "2"]).stdin(Stdio::null()).output().expect("the example starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("one device's losses: equal, bit for bit"), "{text}");
    let rows = [
        ("(6, 72)", "362157516", "362.2M"),
        ("(11, 128)", "2213834176", "2.21B"),
        ("(24, 128)", "4993859008", "4.99B"),
        ("(24, 160)", "7802903600", "7.80B"),
        ("(48, 160)", "15822206000", "15.82B"),
    ];
    for (net, parameters, short) in rows {
        let row = text.lines().find(|line| line.contains(net)).unwrap_or_default();
        assert!(row.contains(parameters) && row.contains(short), "{net}: {row:?}");
    }
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
    for phase in ["Forward", "Recompute", "Backward", "Copy"] {
        assert!(drawn.contains(&format!("<title>{phase} 0, stage")), "{phase}");
    }
}

#[test]
fn senseless_numbers_of_steps_are_refused() {
    for steps in ["0", "-1", "many"] {
        let output = example("gpipe_unet").args(["unused.svg", steps]).output().expect("the example starts");
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.starts_with(&format!("gpipe_unet: got {steps:?} steps")), "{message}");
    }
}
