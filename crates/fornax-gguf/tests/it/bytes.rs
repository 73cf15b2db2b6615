//! Hand-made GGUF bytes, right and wrong. It must not use the crate's own writer, which is under test.

/// Numbers of the value types.
pub(crate) mod t {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const F64: u32 = 12;
}

pub(crate) fn header(version: u32, n_tensors: u64, n_kv: u64) -> Vec<u8> {
    [b"GGUF".as_slice(), &version.to_le_bytes(), &n_tensors.to_le_bytes(), &n_kv.to_le_bytes()]
        .concat()
}

pub(crate) fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

pub(crate) fn kv(key: &str, type_id: u32, value: &[u8]) -> Vec<u8> {
    [&*string(key.as_bytes()), &type_id.to_le_bytes(), value].concat()
}

pub(crate) fn kv_u32(key: &str, value: u32) -> Vec<u8> {
    kv(key, t::U32, &value.to_le_bytes())
}

pub(crate) fn kv_array(key: &str, element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    kv(key, t::ARRAY, &[&element.to_le_bytes(), &count.to_le_bytes()[..], elements].concat())
}

pub(crate) fn tensor(name: &str, dims: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name.as_bytes());
    out.extend_from_slice(&(dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| out.extend_from_slice(&d.to_le_bytes()));
    out.extend_from_slice(&type_id.to_le_bytes());
    out.extend_from_slice(&offset.to_le_bytes());
    out
}

/// Pads the head to `alignment` and adds data.
pub(crate) fn with_data(mut head: Vec<u8>, alignment: usize, data: &[u8]) -> Vec<u8> {
    head.resize(head.len().next_multiple_of(alignment), 0);
    head.extend_from_slice(data);
    head
}

/// A valid file: a few keys, `a` of type Q8_0 and shape [32, 2], `b` of type F32 and shape [8, 2]. The data
/// ends with the last byte of `b`.
pub(crate) fn valid(version: u32) -> Vec<u8> {
    let head = [
        header(version, 2, 4),
        kv("general.architecture", t::STRING, &string(b"test")),
        kv_u32("test.block_count", 2),
        kv_array(
            "tokens",
            t::STRING,
            3,
            &[string(b"a"), string(b""), string("é".as_bytes())].concat(),
        ),
        kv_array("scores", t::F32, 3, &[0, 0, 0x80, 0x3F].repeat(3)),
        tensor("a", &[32, 2], 8, 0),
        tensor("b", &[8, 2], 0, 96),
    ]
    .concat();
    let data: Vec<u8> = (0..96 + 64).map(|i| i as u8).collect();
    with_data(head, 32, &data)
}
