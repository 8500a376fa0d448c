//! Constants of the functions in `math`, per element type.
//!
//! The polynomials are our own: interpolation at Chebyshev points in 60 digits, then rounded, lowest power first. The
//! degrees leave the approximation error well under half a unit in the last place of the function.

/// What `math` needs to know of an element type.
pub(crate) trait Tables: Sized + 'static {
    /// `(e^r - 1 - r) / r^2` for `|r| <= ln(2) / 2`.
    const EXP: &'static [Self];
    /// `(ln((1 + s) / (1 - s)) - 2 s) / s^3` in `s^2`, for `(1 + s) / (1 - s)` from `sqrt(1/2)` to `sqrt(2)`.
    const LN: &'static [Self];
    /// `erf(x) / x - 1` in `x^2` for `|x| <= 1`.
    const ERF: &'static [Self];
    /// `(x + 2) e^(x^2) erfc(x)` in `(x - 2) / (x + 2)`, for x from 0.44 to where erfc vanishes.
    const ERFC: &'static [Self];
    /// `(sin(r) - r) / r^3` in `r^2` for `|r| <= pi / 4`.
    const SIN: &'static [Self];
    /// `(cos(r) - 1 + r^2 / 2) / r^4` in `r^2` for `|r| <= pi / 4`.
    const COS: &'static [Self];
    /// `ln(2)` and what its rounding lost.
    const LN_2: [Self; 2];
    /// `pi / 2` and, twice, what the rounding before lost.
    const PI_2: [Self; 3];
    /// `e^x` is infinite from here on (with room: what matters is that exponents stay in range).
    const EXP_HIGH: Self;
    /// `e^x` rounds to zero from here down.
    const EXP_LOW: Self;
    /// `e^x - 1` rounds to -1 from here down.
    const EXP_M1_LOW: Self;
    /// `tanh` rounds to 1 from here on.
    const TANH_HIGH: Self;
    /// `erfc` rounds to zero from here on.
    const ERFC_HIGH: Self;
    /// Up to here an angle is reduced exactly enough with three parts of `pi / 2`.
    const ANGLE_MAX: Self;
    /// `sin` in f64 or better.
    fn sin_slow(self) -> Self;
    /// `cos` in f64 or better.
    fn cos_slow(self) -> Self;
    /// `pow` in f64 or better.
    fn pow_slow(self, e: Self) -> Self;
}

impl Tables for f32 {
    const EXP: &'static [Self] = &[5.0e-1, 1.6666576e-1, 4.1666552e-2, 8.363233e-3, 1.392625e-3];
    const LN: &'static [Self] = &[6.666667e-1, 4.0000123e-1, 2.8550735e-1, 2.3332761e-1];
    const ERF: &'static [Self] =
        &[1.2837917e-1, -3.7612626e-1, 1.1283594e-1, -2.6854211e-2, 5.1890872e-3, -8.0168643e-4, 7.875875e-5];
    const ERFC: &'static [Self] = &[
        1.0215827,
        -6.871607e-1,
        2.794717e-1,
        -3.644283e-2,
        -2.150312e-2,
        6.4855902e-3,
        3.0406604e-3,
        -8.6406246e-4,
        -5.2481605e-4,
        8.1446065e-5,
    ];
    const SIN: &'static [Self] = &[-1.6666664e-1, 8.332746e-3, -1.9587387e-4];
    const COS: &'static [Self] = &[4.1666664e-2, -1.38883e-3, 2.4547437e-5];
    const LN_2: [Self; 2] = [std::f32::consts::LN_2, -1.9046542e-9];
    const PI_2: [Self; 3] = [std::f32::consts::FRAC_PI_2, -4.371139e-8, -1.7151245e-15];
    const EXP_HIGH: Self = 89.0;
    const EXP_LOW: Self = -104.0;
    const EXP_M1_LOW: Self = -18.0;
    const TANH_HIGH: Self = 10.0;
    const ERFC_HIGH: Self = 10.2;
    const ANGLE_MAX: Self = 32768.0;

    fn sin_slow(self) -> Self {
        f64::from(self).sin() as f32
    }

    fn cos_slow(self) -> Self {
        f64::from(self).cos() as f32
    }

    fn pow_slow(self, e: Self) -> Self {
        f64::from(self).powf(f64::from(e)) as f32
    }
}

impl Tables for f64 {
    const EXP: &'static [Self] = &[
        0.5000000000000001,
        0.16666666666666669,
        0.041666666666623824,
        0.008333333333330039,
        0.0013888888917367081,
        0.00019841269863171557,
        2.4801521057868204e-05,
        2.7557268276905696e-06,
        2.7620201591031547e-07,
        2.5100472505694996e-08,
    ];
    const LN: &'static [Self] = &[
        0.666666666666667,
        0.3999999999989827,
        0.28571428626533335,
        0.22222211043822487,
        0.18182895746801428,
        0.1533150172120742,
        0.1461916477718642,
    ];
    const ERF: &'static [Self] = &[
        0.1283791670955126,
        -0.3761263890318375,
        0.11283791670954879,
        -0.026866170645076792,
        0.0052239776248180145,
        -0.000854832698083379,
        0.0001205533111164271,
        -1.4925595266831182e-05,
        1.6461000484121368e-06,
        -1.6350312701054695e-07,
        1.4659775274047436e-08,
        -1.1372848856791674e-09,
        5.957176147748911e-11,
    ];
    const ERFC: &'static [Self] = &[
        1.021582705242023,
        -0.6871606844138102,
        0.27947209255605676,
        -0.03644223150693846,
        -0.021510661889637277,
        0.006479185070575119,
        0.0030906120632587064,
        -0.000837296125238279,
        -0.0006630735529476325,
        3.4372207916699085e-05,
        0.00014447095441646088,
        3.4143135470575914e-05,
        -2.1695506044212913e-05,
        -1.60937724520434e-05,
        -1.1377629518984956e-06,
        3.56288205398068e-06,
        2.0614150212774093e-06,
        1.486736413615076e-07,
        -7.20136607091249e-07,
        -4.67867942764059e-07,
        1.946361785475712e-07,
        1.6035784267346859e-07,
        -6.310898497062529e-08,
    ];
    const SIN: &'static [Self] = &[
        -0.16666666666666666,
        0.008333333333330925,
        -0.00019841269836722418,
        2.755731608381636e-06,
        -2.5051127944014188e-08,
        1.5917848524808262e-10,
    ];
    const COS: &'static [Self] = &[
        0.041666666666666664,
        -0.0013888888888887382,
        2.480158729874307e-05,
        -2.7557317260008837e-07,
        2.0876143827993133e-09,
        -1.1382456778061306e-11,
    ];
    const LN_2: [Self; 2] = [std::f64::consts::LN_2, 2.3190468138462996e-17];
    const PI_2: [Self; 3] = [std::f64::consts::FRAC_PI_2, 6.123233995736766e-17, -1.4973849048591698e-33];
    const EXP_HIGH: Self = 710.0;
    const EXP_LOW: Self = -746.0;
    const EXP_M1_LOW: Self = -38.0;
    const TANH_HIGH: Self = 20.0;
    const ERFC_HIGH: Self = 27.4;
    const ANGLE_MAX: Self = 1048576.0;

    fn sin_slow(self) -> Self {
        self.sin()
    }

    fn cos_slow(self) -> Self {
        self.cos()
    }

    fn pow_slow(self, e: Self) -> Self {
        self.powf(e)
    }
}
