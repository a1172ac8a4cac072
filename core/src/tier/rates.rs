//! When loading beats computing: measured rates, and the rule.

/// What is fixed instead of measured: for tests and for measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Bytes per millisecond from host memory to the device.
    pub copy: Option<f64>,
    /// Bytes per millisecond from disk to host memory.
    pub disk: Option<f64>,
    /// Prompt tokens per millisecond.
    pub prompt: Option<f64>,
}

impl Rates {
    /// Loading always wins.
    pub const ALWAYS: Self = Self { copy: Some(f64::INFINITY), disk: Some(f64::INFINITY), prompt: None };

    /// Whether loading these bytes takes less time than computing so many tokens. What is neither fixed nor measured costs nothing
    /// to load: only a first load can measure it.
    pub fn favour_loading(&self, host_bytes: u64, disk_bytes: u64, tokens: usize) -> bool {
        let Some(prompt) = self.prompt else { return true };
        let time = |bytes: u64, rate: Option<f64>| rate.map_or(0.0, |rate| bytes as f64 / rate);
        // What is on disk is copied twice.
        let load = time(host_bytes + disk_bytes, self.copy) + time(disk_bytes, self.disk);
        load < tokens as f64 / prompt
    }

    /// These rates, and measured ones where they say nothing.
    pub fn or(self, measured: Self) -> Self {
        Self {
            copy: self.copy.or(measured.copy),
            disk: self.disk.or(measured.disk),
            prompt: self.prompt.or(measured.prompt),
        }
    }
}

/// A rate out of measurements: the newest ones count most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    amount: f64,
    time: f64,
}

impl Pace {
    /// Adds one measurement; without a clock it says nothing.
    pub fn add(&mut self, amount: f64, time: f64) {
        /// Of the old sums that remain.
        const KEPT: f64 = 0.9;
        if time > 0.0 && amount > 0.0 {
            (self.amount, self.time) = (self.amount * KEPT + amount, self.time * KEPT + time);
        }
    }

    /// Amount per time; `None` without a measurement.
    pub fn rate(&self) -> Option<f64> {
        (self.time > 0.0).then(|| self.amount / self.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_over_copy_rate_against_tokens_over_prompt_rate() {
        let rates = Rates { copy: Some(1000.0), disk: Some(100.0), prompt: Some(2.0) };
        // 64 tokens take 32 ms.
        assert!(rates.favour_loading(31_000, 0, 64) && !rates.favour_loading(33_000, 0, 64));
        // 2,900 bytes of a file take 29 ms to read and 2.9 ms to copy.
        assert!(rates.favour_loading(0, 2900, 64) && !rates.favour_loading(0, 2950, 64));
        assert!(!rates.favour_loading(1000, 2900, 64));
        let unknown = Rates { copy: None, disk: None, prompt: Some(1e9) };
        assert!(unknown.favour_loading(u64::MAX / 2, 0, 64), "the first load measures");
        assert!(Rates::ALWAYS.or(rates).favour_loading(u64::MAX / 2, 1 << 40, 1));
    }

    #[test]
    fn the_newest_measurements_count_most() {
        let mut pace = Pace::default();
        assert_eq!(pace.rate(), None);
        pace.add(10.0, 0.0);
        assert_eq!(pace.rate(), None, "a clock that stands still");
        (0..50).for_each(|_| pace.add(10.0, 1.0));
        (0..50).for_each(|_| pace.add(20.0, 1.0));
        assert!(pace.rate().is_some_and(|rate| rate > 19.0 && rate <= 20.0));
    }
}
