"""Makes packages of d.vmdk as tools write them that are not ours."""

import io
import struct
import tarfile

FORMAT = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"
ENVELOPE = "http://schemas.dmtf.org/ovf/envelope/1"
RASD = "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"


def item(number, kind, **more):
    fields = dict(more, InstanceID=number, ResourceType=kind)
    return "<Item>" + "".join(f"<rasd:{name}>{fields[name]}</rasd:{name}>" for name in sorted(fields)) + "</Item>"


def descriptor(href, disks):
    items = [item(1, 3, VirtualQuantity=1), item(2, 4, VirtualQuantity=512, AllocationUnits="byte * 2^20")]
    items.append(item(3, 20, Address=0))
    for place, (key, _) in enumerate(disks):
        items.append(item(10 + place, 17, AddressOnParent=place, Parent=3, HostResource=f"ovf:/disk/{key}"))
    return f"""<?xml version="1.0"?>
<Envelope xmlns="{ENVELOPE}" xmlns:ovf="{ENVELOPE}" xmlns:rasd="{RASD}">
<References><File ovf:id="file1" ovf:href="{href}"/></References>
<DiskSection><Info/>{"".join(f'<Disk ovf:diskId="{key}" {more}/>' for key, more in disks)}</DiskSection>
<VirtualSystem ovf:id="web1"><Info/><VirtualHardwareSection><Info/>{"".join(items)}</VirtualHardwareSection></VirtualSystem>
</Envelope>""".encode()


def package(name, href, disks, image):
    with tarfile.open(name, "w", format=tarfile.USTAR_FORMAT) as archive:
        for member, content in (("web1.ovf", descriptor(href, disks)), ("d.vmdk", image)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def turned(image):
    """The image with its first two grains in the other order, and the table that says so."""
    start = struct.unpack_from("<Q", image, 64)[0] * 512

    def length(at):
        return -(-(struct.unpack_from("<I", image, at + 8)[0] + 12) // 512) * 512

    second = start + length(start)
    third = second + length(second)
    grains = image[second:third] + image[start:second]
    old = struct.pack("<II", start // 512, second // 512)
    new = struct.pack("<II", (start + third - second) // 512, start // 512)
    head, tail = image[:start], image[third:]
    assert old in head or old in tail
    return head.replace(old, new) + grains + tail.replace(old, new)


with open("d.vmdk", "rb") as file:
    vmdk = file.read()
stored = f'ovf:fileRef="file1" ovf:format="{FORMAT}" ovf:capacity='
whole = ("vmdisk1", stored + f'"{20 << 20}"')
blank = ("vmdisk2", f'ovf:format="{FORMAT}" ovf:capacity="30" ovf:capacityAllocationUnits="byte * 2^20"')
package("blank.ova", "./d.vmdk", [whole, blank], vmdk)
package("oracle.ova", "d.vmdk", [("vmdisk1", stored + f'"{len(vmdk)}"')], vmdk)
package("back.ova", "d.vmdk", [whole], turned(vmdk))
