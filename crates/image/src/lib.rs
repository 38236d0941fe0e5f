//! Disk image formats as block devices.
