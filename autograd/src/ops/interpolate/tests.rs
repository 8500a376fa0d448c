//! Values worked out by hand, derivatives, refusals.

use phalanx_tensor::{DType, Device};

use super::{Interpolate, InterpolateMode as Mode};
use crate::Var;
use crate::ops::testing::check_twice;

fn row(values: &[f64], options: &Interpolate) -> Vec<f64> {
    let x = Var::from_slice(values, &[1, 1, values.len()], Device::CPU).unwrap();
    x.interpolate(options).unwrap().to_vec().unwrap()
}

#[test]
fn places_follow_the_rule_of_each_mode() {
    let x = [1.0, 2.0, 4.0, 8.0];
    let to = |size: usize, mode| row(&x, &Interpolate::to_size(&[size], mode));
    assert_eq!(to(6, Mode::Nearest), [1.0, 1.0, 2.0, 4.0, 4.0, 8.0]);
    assert_eq!(to(2, Mode::NearestExact), [2.0, 8.0]);
    assert_eq!(to(2, Mode::Area), [1.5, 6.0]);
    assert_eq!(to(3, Mode::Area), [1.5, 3.0, 6.0]);
    assert_eq!(to(8, Mode::Linear), [1.0, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 8.0]);
    assert_eq!(to(1, Mode::Linear), [3.0]);
    let aligned = Interpolate::to_size(&[7], Mode::Linear).with_align_corners(true);
    assert_eq!(row(&x, &aligned), [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]);
    // Where the factor is given, it is the distance: 4 * 1.3 is 5 pixels, each 1 / 1.3 from the last.
    let scaled = row(&x, &Interpolate::by_scale(&[1.3], Mode::Linear));
    assert_eq!(scaled.len(), 5);
    let third = 2.5 / 1.3 - 0.5;
    assert!((scaled[2] - (2.0 + 2.0 * (third - 1.0))).abs() < 1e-12);
}

#[test]
fn what_a_pixel_does_not_depend_on_cannot_spoil_it() {
    let x = [1.0, f64::NAN, 3.0, 4.0, 5.0, f64::INFINITY];
    let y = row(&x, &Interpolate::to_size(&[12], Mode::Linear));
    assert_eq!(&y[6..=8], [3.75, 4.25, 4.75]);
    assert!(y[1].is_nan() && y[11] == f64::INFINITY);
}

#[test]
fn derivatives_hold_in_every_mode() {
    use Mode::{Area, Bicubic, Bilinear, Linear, Nearest, NearestExact, Trilinear};
    for mode in [Nearest, NearestExact, Linear, Area] {
        for options in [Interpolate::to_size(&[7], mode), Interpolate::by_scale(&[0.6], mode)] {
            check_twice(&[&[2, 2, 5]], |v| v[0].tanh()?.interpolate(&options));
        }
    }
    for mode in [Nearest, Bilinear, Bicubic, Area] {
        check_twice(&[&[1, 2, 3, 5]], |v| v[0].tanh()?.interpolate(&Interpolate::to_size(&[5, 2], mode)));
    }
    for mode in [Bilinear, Bicubic] {
        let options = Interpolate::by_scale(&[2.0, 0.5], mode).with_align_corners(true);
        check_twice(&[&[1, 2, 3, 5]], |v| v[0].tanh()?.interpolate(&options));
    }
    let volume = Interpolate::to_size(&[3], Trilinear);
    check_twice(&[&[1, 1, 2, 4, 3]], |v| v[0].tanh()?.interpolate(&volume));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let x = Var::arange(0, 12, 1, DType::F32, Device::CPU).unwrap().reshape(&[1, 1, 3, 4]).unwrap();
    let says = |options: Interpolate, what: &str| {
        let error = x.interpolate(&options).unwrap_err().to_string();
        assert!(error.starts_with("interpolate: ") && error.contains(what), "{error}");
    };
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        says(Interpolate::by_scale(&[factor], Mode::Bilinear), "factors above 0");
    }
    says(Interpolate::by_scale(&[0.1], Mode::Nearest), "at least one pixel");
    says(Interpolate::by_scale(&[1e300], Mode::Nearest), "memory");
    says(Interpolate::to_size(&[0, 3], Mode::Nearest), "at least one pixel");
    says(Interpolate::to_size(&[2, 3, 4], Mode::Nearest), "one for all");
    says(Interpolate::to_size(&[], Mode::Nearest), "one for all");
    says(Interpolate::to_size(&[2], Mode::Linear), "[n, channels, length]");
    says(Interpolate::to_size(&[2], Mode::Nearest).with_align_corners(true), "aligned corners");
    let whole = x.to(DType::I64).unwrap();
    assert!(whole.interpolate(&Interpolate::to_size(&[2], Mode::Bilinear)).is_err());
    assert_eq!(
        whole.interpolate(&Interpolate::to_size(&[2], Mode::Nearest)).unwrap().to_vec::<i64>().unwrap(),
        [0, 2, 4, 6]
    );
}
