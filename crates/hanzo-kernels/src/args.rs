//! Arguments of kernels: one struct an op, printed from its header, generic over what a pointer is.

/// A weight in device layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weight<P> {
    /// Plane 0.
    pub base: P,
    /// Where planes 1 to 3 begin, in units of 16 bytes from `base`; 0 for a plane that is not there.
    pub planes: [u32; 3],
    /// The format's codebook (anything, for a format without one).
    pub table: P,
}

/// One field of an argument struct.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Field<P> {
    /// A weight: 32 bytes.
    Weight(Weight<P>),
    /// A pointer that is only read.
    Read(P),
    /// A pointer that is written.
    Write(P),
    /// A number.
    U32(u32),
    /// A number.
    F32(f32),
}

/// An op's arguments.
pub trait Args<P: Copy> {
    /// The op's name.
    const OP: &'static str;
    /// Bytes of the argument struct.
    const BYTES: usize;
    /// Calls `f` with the byte offset and value of each field, in order.
    fn fields(&self, f: &mut dyn FnMut(usize, Field<P>));

    /// The struct as bytes. `relocate` gets the byte offset of each pointer, whose eight bytes are left zero.
    fn encode(&self, relocate: &mut dyn FnMut(usize, P)) -> Vec<u8> {
        let mut bytes = vec![0; Self::BYTES];
        let mut put = |at: usize, b: [u8; 4]| bytes[at..at + 4].copy_from_slice(&b);
        self.fields(&mut |at, field| match field {
            Field::Weight(w) => {
                relocate(at, w.base);
                w.planes.iter().enumerate().for_each(|(i, p)| put(at + 8 + 4 * i, p.to_le_bytes()));
                relocate(at + 24, w.table);
            }
            Field::Read(p) | Field::Write(p) => relocate(at, p),
            Field::U32(x) => put(at, x.to_le_bytes()),
            Field::F32(x) => put(at, x.to_le_bytes()),
        });
        bytes
    }
}

include!(concat!(env!("OUT_DIR"), "/args.rs"));
