//! Why a command buffer did not complete, what that means for the next, and what to do: from the numbers and names
//! that Metal and its driver give. It calls nothing.

/// Causes, by `MTLCommandBufferError` and the driver's own names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A kernel did what it must not: told by a stand-in, which then stops.
    Kernel,
    Internal,
    TimedOut,
    /// The display had to wait for it.
    Impacting,
    /// Earlier errors: nothing of this process is run any more.
    Ignored,
    /// Another process's fault reset the device.
    Victim,
    PageFault,
    NotPermitted,
    OutOfMemory,
    InvalidResource,
    Removed,
    StackOverflow,
    Other,
}

/// A command buffer's failure.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    /// What was said, whole.
    pub(crate) text: String,
}

impl Cause {
    /// From the error's code and text. The driver's name for it, in the text, is the finer one.
    #[cfg_attr(not(any(target_os = "macos", test)), allow(dead_code, reason = "Metal's numbers"))]
    pub(crate) fn of(code: isize, text: &str) -> Cause {
        let named = [
            ("SubmissionsIgnored", Cause::Ignored),
            ("InnocentVictim", Cause::Victim),
            ("ImpactingInteractivity", Cause::Impacting),
            ("0000000e", Cause::Impacting),
            ("ErrorHang", Cause::TimedOut),
            ("ErrorTimeout", Cause::TimedOut),
            ("PageFault", Cause::PageFault),
            ("ErrorOutOfMemory", Cause::OutOfMemory),
            ("ErrorInvalidResource", Cause::InvalidResource),
        ];
        if let Some((_, cause)) = named.iter().find(|(name, _)| text.contains(name)) {
            return *cause;
        }
        match code {
            1 => Cause::Internal,
            2 => Cause::TimedOut,
            3 => Cause::PageFault,
            4 => Cause::Ignored,
            7 => Cause::NotPermitted,
            8 => Cause::OutOfMemory,
            9 => Cause::InvalidResource,
            11 => Cause::Removed,
            12 => Cause::StackOverflow,
            _ => Cause::Other,
        }
    }

    /// True where no later command buffer of this process will run.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Cause::Kernel | Cause::Ignored | Cause::NotPermitted | Cause::Removed)
    }

    /// What it is called, and what to do about it.
    fn words(self) -> (&'static str, &'static str) {
        let report = "please report it with the output of `fornax devices --report`";
        match self {
            Cause::Kernel => ("a kernel failed", ""),
            Cause::Internal => ("internal error", report),
            Cause::TimedOut => ("it ran too long", "try a smaller model or --device cpu"),
            Cause::Impacting => {
                ("the display had to wait for it", "try a smaller model or --device cpu")
            }
            Cause::Ignored => (
                "the system ignores this process after earlier errors",
                "start the program again; the first error is the one that matters",
            ),
            Cause::Victim => ("another program's fault reset the device", "try again"),
            Cause::PageFault => ("a kernel touched memory that is not there", report),
            Cause::NotPermitted => ("this process may not use the device", "run it in a session"),
            Cause::OutOfMemory => (
                "no memory for it on the device",
                "try a smaller --ctx, a smaller model or the CPU",
            ),
            Cause::InvalidResource => ("a buffer was gone", report),
            Cause::Removed => ("the device was removed", ""),
            Cause::StackOverflow => ("a kernel's stack overflowed", report),
            Cause::Other => ("it failed", report),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, advice) = self.cause.words();
        if self.cause == Cause::Kernel {
            return f.write_str(&self.text);
        }
        write!(f, "{name} ({})", self.text)?;
        if advice.is_empty() { Ok(()) } else { write!(f, "; {advice}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_name_is_preferred_to_the_number() {
        let ignored = "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)";
        let timeout = "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)";
        let victim = "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)";
        for (code, text, cause, last) in [
            (4, ignored, Cause::Ignored, true),
            (1, ignored, Cause::Ignored, true),
            (2, timeout, Cause::TimedOut, false),
            (1, victim, Cause::Victim, false),
            (1, "Internal Error (0000000e:Internal Error)", Cause::Impacting, false),
            (
                8,
                "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
                Cause::OutOfMemory,
                false,
            ),
            (
                9,
                "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)",
                Cause::InvalidResource,
                false,
            ),
            (
                3,
                "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
                Cause::PageFault,
                false,
            ),
            (7, "not permitted", Cause::NotPermitted, true),
            (11, "gone", Cause::Removed, true),
            (99, "news", Cause::Other, false),
        ] {
            assert_eq!(Cause::of(code, text), cause, "{text}");
            assert_eq!(cause.is_final(), last, "{text}");
            let told = Failure { cause, text: text.into() }.to_string();
            assert!(told.contains(text), "the text is told whole: {told}");
        }
    }
}
