//! Whether AMX is there and right: asked of the processor and the system, then tried out. It must not know formats.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::{ACT_STEP, FULL, HALVES, PLAIN, Silicon, Unit, WHOLE};
use crate::matrix::GROUP;
use crate::matrix::simd::{BLOCK, QUADS, TILE};

/// Whether this processor has the registers, the system lets this process use them, and a trial
/// gave the right sums. The trial runs in a child process, so that a processor which claims more
/// than it has ends that and nothing else. Asked once.
pub(crate) fn works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    // SAFETY: the trial comes only after the other two.
    *WORKS.get_or_init(|| claimed() && permitted() && tried(|| unsafe { right_sums(&mut Silicon) }))
}

/// Whether [`Unit::dot_halves`] is there besides and was tried. Asked once.
pub(crate) fn has_halves() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    // AMX-BF16.
    let claimed = || __cpuid_count(7, 0).edx >> 22 & 1 == 1;
    // SAFETY: the registers are there.
    *HAS.get_or_init(|| works() && claimed() && tried(|| unsafe { right_halves(&mut Silicon) }))
}

fn claimed() -> bool {
    /// Tile configuration and tile data in the set of states that the system keeps.
    const STATES: u64 = 3 << 17;
    #[target_feature(enable = "xsave")]
    fn states() -> u64 {
        // SAFETY: the feature is there, and register 0 exists.
        unsafe { _xgetbv(0) }
    }
    if !is_x86_feature_detected!("xsave") || __cpuid(0).eax < 7 {
        return false;
    }
    // OSXSAVE; AMX-TILE and AMX-INT8.
    let system = __cpuid(1).ecx >> 27 & 1 == 1;
    let tiles = __cpuid_count(7, 0).edx >> 24 & 3 == 3;
    // SAFETY: the feature was found, and the system has enabled it.
    system && tiles && unsafe { states() } & STATES == STATES
}

#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` and the number of the tile data; for all threads of the process.
    const REQUEST: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: asks for a permission and touches no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

#[cfg(target_os = "linux")]
fn tried(trial: impl Fn() -> bool) -> bool {
    // SAFETY: the child only computes on its own stack and leaves at once.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(if trial() { 0 } else { 1 });
        }
        let mut status = 0;
        while child > 0 && libc::waitpid(child, &mut status, 0) < 0 {
            if *libc::__errno_location() != libc::EINTR {
                return false;
            }
        }
        child > 0 && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[cfg(not(target_os = "linux"))]
fn tried(_: impl Fn() -> bool) -> bool {
    false
}

/// Whether a product of every shape used here comes out right.
///
/// # Safety
/// The unit's registers are there.
pub(in crate::matrix) unsafe fn right_sums<U: Unit>(unit: &mut U) -> bool {
    let act = |row: usize, k: usize| ((row * 37 + k * 11) % 255) as i32 - 127;
    let weight = |k: usize, col: usize| ((k * 29 + col * 53) % 256) as i32 - 128;
    let mut acts = [[0u8; ACT_STEP]; GROUP];
    let mut weights = [[0u8; 64]; QUADS];
    for k in 0..BLOCK {
        for at in 0..GROUP {
            acts[at][k] = act(at, k) as u8;
            weights[k / 4][at * 4 + k % 4] = weight(k, at) as u8;
        }
    }
    /// As the registers store them.
    #[repr(C, align(64))]
    struct Stored([[[i32; TILE]; GROUP]; 4]);
    let mut stored = Stored([[[0; TILE]; GROUP]; 4]);
    let (x, w, to) = (acts.as_ptr().cast::<u8>(), weights.as_ptr().cast::<u8>(), &mut stored.0);
    // SAFETY: all of these are as large as the registers.
    unsafe {
        unit.shape(&WHOLE);
        unit.load::<4>(x, ACT_STEP);
        unit.load::<5>(w, 64);
        unit.zero::<0>();
        unit.dot::<0, 4, 5>();
        unit.store::<0>(to[0].as_mut_ptr().cast());
        unit.load::<6>(x, ACT_STEP);
        unit.load::<7>(w, 64);
        unit.zero::<2>();
        unit.dot::<2, 6, 7>();
        unit.store::<2>(to[1].as_mut_ptr().cast());
        unit.shape(&HALVES);
        unit.load::<4>(x, ACT_STEP);
        unit.load::<5>(w, 64);
        unit.zero::<1>();
        unit.dot::<1, 4, 5>();
        unit.store::<1>(to[2].as_mut_ptr().cast());
        unit.load::<6>(x.add(BLOCK / 2), ACT_STEP);
        unit.load::<7>(w.add(PLAIN / 2), 64);
        unit.zero::<3>();
        unit.dot::<3, 6, 7>();
        unit.store::<3>(to[3].as_mut_ptr().cast());
    }
    let mut right = true;
    for row in 0..GROUP {
        for col in 0..TILE {
            let part = |from: usize, to: usize| {
                (from..to).map(|k| act(row, k) * weight(k, col)).sum::<i32>()
            };
            right &= to[0][row][col] == part(0, 32) && to[1][row][col] == part(0, 32);
            right &= to[2][row][col] == part(0, 16) && to[3][row][col] == part(16, 32);
        }
    }
    right
}

/// Whether products of bfloat16 come out right; of small integers, so that nothing is rounded.
///
/// # Safety
/// The unit's registers are there.
pub(in crate::matrix) unsafe fn right_halves<U: Unit>(unit: &mut U) -> bool {
    let half = |v: i32| ((v as f32).to_bits() >> 16) as u16;
    let act = |row: usize, k: usize| ((row * 5 + k * 3) % 13) as i32 - 6;
    let weight = |k: usize, col: usize| ((k * 7 + col * 11) % 17) as i32 - 8;
    let (mut acts, mut weights) = ([[0u16; 32]; TILE], [[0u16; 32]; TILE]);
    for k in 0..32 {
        for at in 0..TILE {
            acts[at][k] = half(act(at, k));
            weights[k / 2][at * 2 + k % 2] = half(weight(k, at));
        }
    }
    let mut stored = [[0.0f32; 2 * TILE]; TILE];
    // SAFETY: all of these are as large as the registers.
    unsafe {
        unit.shape(&FULL);
        unit.zero::<0>();
        unit.load::<4>(acts.as_ptr().cast(), 64);
        unit.load::<6>(weights.as_ptr().cast(), 64);
        unit.dot_halves::<0, 4, 6>();
        unit.store_apart::<0>(stored.as_mut_ptr().cast(), 8 * TILE);
    }
    let sum = |row, col| (0..32).map(|k| act(row, k) * weight(k, col)).sum::<i32>() as f32;
    (0..TILE).all(|row| (0..TILE).all(|col| stored[row][col] == sum(row, col)))
}
