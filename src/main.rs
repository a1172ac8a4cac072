//! The program of selkie.

use std::process::ExitCode;

fn main() -> ExitCode {
    silence_drivers();
    ExitCode::from(selkie::cli::run(std::env::args_os().collect()))
}

/// Turns off Mesa's layer that reorders Vulkan devices, unless it is configured: it asks Wayland, which prints errors on machines
/// without a session.
#[cfg(target_os = "linux")]
fn silence_drivers() {
    if ["NODEVICE_SELECT", "MESA_VK_DEVICE_SELECT"].iter().all(|name| std::env::var_os(name).is_none()) {
        // SAFETY: this is the first statement of `main`; there is no other thread that could read the environment.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
}

#[cfg(not(target_os = "linux"))]
fn silence_drivers() {}
