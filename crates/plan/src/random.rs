//! Random numbers of a seed.

/// A generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // Zero is the state that the generator does not leave.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Uniform in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        (bits + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.uniform().ln()
    }

    fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.uniform(), self.uniform());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// Gamma of a `shape` from 1, with this mean (Marsaglia and Tsang 2000).
    pub fn gamma(&mut self, shape: f64, mean: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.uniform().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v * mean / shape;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean and the variance of many numbers.
    fn moments(mut draw: impl FnMut() -> f64) -> (f64, f64) {
        let count = 200_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..count {
            let value = draw();
            sum += value;
            squares += value * value;
        }
        let mean = sum / f64::from(count);
        (mean, squares / f64::from(count) - mean * mean)
    }

    #[test]
    fn distributions_have_their_mean_and_variance() {
        let mut random = Random::new(3);
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.03;
        let (mean, variance) = moments(|| random.uniform());
        assert!(near(mean, 0.5) && near(variance, 1.0 / 12.0), "{mean} {variance}");
        let (mean, variance) = moments(|| random.exponential(5.0));
        assert!(near(mean, 5.0) && near(variance, 25.0), "{mean} {variance}");
        let (mean, variance) = moments(|| random.gamma(1.5, 6.0));
        assert!(near(mean, 6.0) && near(variance, 24.0), "{mean} {variance}");
    }
}
