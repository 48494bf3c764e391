"""The grids of ggml's IQ types: sets of weight vectors that an index picks from.

A grid's vectors are points of {0 … levels - 1}^width, ascending in sum(digit[j] * levels**j), their index. So a grid
is the set of those numbers: a bit map, bit n % 8 of byte n // 8, kept zlib-compressed in base 85.
Source: the tables `iq1s_grid`, `iq2xxs_grid`, … of ggml-common.h.

              vectors  width  what the digits stand for
    IQ1_S        2048      8  -1, 0, 1 (IQ1_M too)
    IQ2_XXS       256      8  8, 25, 43
    IQ2_XS        512      8  8, 25, 43
    IQ2_S        1024      8  8, 25, 43
    IQ3_XXS       256      4  4, 12, 20, 28, 36, 44, 52, 62
    IQ3_S         512      4  1, 3, 5, … 15
"""

from __future__ import annotations

import base64
import functools
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAPS = {
    "IQ1_S": (
        b"c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2"
        b"WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uB"
        b"Y$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<h"
        b"d(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH5"
        b"2w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g"
        b"3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z"
        b"{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
        b"0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}"
        b"u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        b"eu*|v(bMFD;1sQ1"
    ),
    "IQ2_XXS": (
        b"c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI"
        b"!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;"
        b"MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2"
        b"J=^JV`E{Z0D^#$6R7"
    ),
    "IQ2_XS": (
        b"c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-f"
        b"CU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF"
        b"!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T"
        b"}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q"
        b"_=>7msuqjC"
    ),
    "IQ2_S": (
        b"c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh"
        b"^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l"
        b"7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el"
        b"6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM"
        b"7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
    ),
    "IQ3_XXS": (
        b"c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY"
        b"<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|"
        b"dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wE"
        b"o20v5Uy_5"
    ),
    "IQ3_S": (
        b"c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%"
        b"@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@"
        b"c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()"
        b"?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB"
        b"(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """The digits of a vector are written as `values`. map: whose bit map it is."""

    map: str
    values: tuple[int, ...]
    width: int


_IQ2, _IQ1 = (8, 25, 43), (8, 16, 24)
#: what the codes of `iquant` are made of: IQ1 in eighths above the zero of 5-bit codes, IQ3_XXS halved to fit 6 bits
GRIDS = {
    "IQ1_S": Grid("IQ1_S", _IQ1, 8), "IQ1_M": Grid("IQ1_S", _IQ1, 8),
    "IQ2_XXS": Grid("IQ2_XXS", _IQ2, 8), "IQ2_XS": Grid("IQ2_XS", _IQ2, 8), "IQ2_S": Grid("IQ2_S", _IQ2, 8),
    "IQ3_XXS": Grid("IQ3_XXS", (2, 6, 10, 14, 18, 22, 26, 31), 4),
    "IQ3_S": Grid("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15), 4),
}  # fmt: skip


@functools.cache
def code_grid(name: str) -> npt.NDArray[np.uint8]:
    """uint8 [vectors, width]: the parts that a type's codes are made of. Raises KeyError for types without a grid."""
    kind = GRIDS[name]
    return grid(kind.map, kind.values, kind.width)


def grid(name: str, values: tuple[int, ...], width: int) -> npt.NDArray[np.uint8]:
    """uint8 [vectors, width]: the grid's vectors in order of their index, digit d written as values[d]."""
    packed = np.frombuffer(zlib.decompress(base64.b85decode(_MAPS[name])), dtype=np.uint8)
    numbers = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    digits = numbers[:, np.newaxis] // len(values) ** np.arange(width) % len(values)
    found: npt.NDArray[np.uint8] = np.array(values, dtype=np.uint8)[digits]
    return found
