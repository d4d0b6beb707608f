//! A stand-in for the tiles of processors that have none: a handler for the signal that their instructions end in there
//! decodes and carries out the six that are used (Intel's Software Developer's Manual, volume 2, has their encodings).

use std::cell::RefCell;
use std::sync::Once;

/// The registers of `rax` to `r15` in the order of their numbers, as indices of the saved ones.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Shapes, as `ldtilecfg` read them, and contents.
struct Tiles {
    shapes: [u8; 64],
    rows: [[[u8; 64]; 16]; 8],
}

thread_local! {
    static TILES: RefCell<Tiles> = const { RefCell::new(Tiles { shapes: [0; 64], rows: [[[0; 64]; 16]; 8] }) };
}

/// From now on the process carries out instructions for tiles that its processor does not know.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: zeros are a valid action, and the handler has the signature that `SA_SIGINFO` asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = carry_out as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()), 0);
        }
    });
}

extern "C" fn carry_out(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands the thread's saved registers to a handler of `SA_SIGINFO`.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let next = TILES.with_borrow_mut(|tiles| tiles.carry_out(registers));
    registers[libc::REG_RIP as usize] = next;
}

impl Tiles {
    fn height(&self, tile: usize) -> usize {
        usize::from(self.shapes[48 + tile])
    }

    fn width(&self, tile: usize) -> usize {
        usize::from(u16::from_le_bytes([self.shapes[16 + 2 * tile], self.shapes[17 + 2 * tile]]))
    }

    /// Carries out the instruction at the saved place; returns that of the next.
    fn carry_out(&mut self, registers: &[i64; 23]) -> i64 {
        let start = registers[libc::REG_RIP as usize];
        // SAFETY: an instruction lies here; the longest has 15 bytes, and the code of this program goes on behind it.
        let code = unsafe { &*(start as *const [u8; 15]) };
        let [vex, extension, operands, operation, mode, ..] = *code;
        if vex != 0xc4 || extension & 0x1f != 2 {
            std::process::abort();
        }
        // Registers from 8 on have a bit of their own, inverted.
        let upper = |bit: u8| if extension & bit == 0 { 8 } else { 0 };
        let register = |number: u8| registers[REGISTERS[usize::from(number)] as usize];
        let (tile, low, other) = (usize::from(mode >> 3 & 7), mode & 7, usize::from(!(operands >> 3) & 7));
        let (mut at, mut address, mut stride) = (5, 0, 0);
        if mode >> 6 != 3 {
            let mut base = low;
            if low == 4 {
                let scaled = code[at];
                (at, base) = (at + 1, scaled & 7);
                let index = (scaled >> 3 & 7) + upper(0x40);
                stride = if index == 4 { 0 } else { register(index) << (scaled >> 6) };
            }
            address = register(base + upper(0x20));
            match mode >> 6 {
                1 => (at, address) = (at + 1, address + i64::from(code[at].cast_signed())),
                2 => {
                    let bytes = [code[at], code[at + 1], code[at + 2], code[at + 3]];
                    (at, address) = (at + 4, address + i64::from(i32::from_le_bytes(bytes)));
                }
                _ if base == 5 => std::process::abort(),
                _ => {}
            }
        }
        match (operation, operands & 3) {
            (0x49, 0) if mode >> 6 == 3 => self.shapes = [0; 64],
            // SAFETY: 64 bytes of shapes lie at the operand.
            (0x49, 0) => self.shapes = unsafe { *(address as *const [u8; 64]) },
            (0x49, 3) => self.rows[tile] = [[0; 64]; 16],
            (0x4b, prefix) => {
                let (height, width) = (self.height(tile), self.width(tile));
                for (i, row) in self.rows[tile].iter_mut().enumerate().take(height) {
                    let memory = address + stride * i.cast_signed() as i64;
                    // SAFETY: a row of the tile lies there.
                    unsafe {
                        if prefix == 3 {
                            std::ptr::copy_nonoverlapping(memory as *const u8, row.as_mut_ptr(), width);
                        } else {
                            std::ptr::copy_nonoverlapping(row.as_ptr(), memory as *mut u8, width);
                        }
                    }
                }
            }
            (0x5c, 2) => self.multiply(tile, usize::from(low), other),
            _ => std::process::abort(),
        }
        start + at.cast_signed() as i64
    }

    /// `tdpbf16ps`.
    fn multiply(&mut self, sums: usize, left: usize, right: usize) {
        let number = |row: &[u8; 64], i: usize| f32::from_bits(u32::from_le_bytes([0, 0, row[2 * i], row[2 * i + 1]]));
        for m in 0..self.height(sums) {
            for n in 0..self.width(sums) / 4 {
                let products = (0..self.width(left) / 2)
                    .map(|k| number(&self.rows[left][m], k) * number(&self.rows[right][k / 2], 2 * n + k % 2));
                let products: f32 = products.sum();
                let sum = &mut self.rows[sums][m][4 * n..4 * n + 4];
                let before = f32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]);
                sum.copy_from_slice(&(before + products).to_le_bytes());
            }
        }
    }
}
